"""git inside a sandbox: running it with a fixed configuration, and truncating the history of an image's repository.

Images are made from clones, and a clone contains the future of its base commit: the branch with the fix, tags, fetched
refs, the reflog. After `truncate_git_history` one branch is left, with the ancestors of the base commit and, if the
image's files differ from the base commit, one commit with the differences. Objects that cannot be reached from this
branch are removed, and a count checks that none of them is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar_proxy.errors import PolarError
from sandboxes import Sandbox

# The agent may have changed the repository's configuration; these options override it when the patch is read.
_GIT = (
    "git",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.autocrlf=false",
    "-c",
    "commit.gpgsign=false",
    "-c",
    "gc.auto=0",
    "-c",
    "safe.directory=*",
)
_ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "polar",
    "GIT_AUTHOR_EMAIL": "polar@localhost",
    "GIT_COMMITTER_NAME": "polar",
    "GIT_COMMITTER_EMAIL": "polar@localhost",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_TERMINAL_PROMPT": "0",
}
_SECONDS = 60.0
_PATCH_LIMIT = 32 << 20
SNAPSHOT_REPOSITORY = ".polar-snapshot"
"""Folder in HOME of the snapshot repository, which lies outside the workspace."""


class WorkspaceError(PolarError):
    """The workspace could not be prepared or read."""


async def git(
    sandbox: Sandbox, *arguments: str, snapshot: bool = False, seconds: float = _SECONDS, stdin: bytes = b""
) -> bytes:
    """Run git in the workspace, with `snapshot` on the snapshot repository; return stdout. Raises `WorkspaceError`."""
    name = next((word for word in arguments if not word.startswith("-") and "=" not in word), "")
    return await _run(sandbox, (*_GIT, *arguments), f"git {name}", snapshot, seconds, stdin)


async def shell(
    sandbox: Sandbox, script: str, *arguments: str, snapshot: bool = False, seconds: float = _SECONDS
) -> bytes:
    """Run a shell script in the workspace, with git's fixed environment; return stdout. Raises `WorkspaceError`."""
    return await _run(
        sandbox, ("sh", "-c", script, "sh", *arguments), "preparing the workspace", snapshot, seconds, b""
    )


async def _run(sandbox: Sandbox, argv: Sequence[str], what: str, snapshot: bool, seconds: float, stdin: bytes) -> bytes:
    env = dict(_ENV)
    if snapshot:
        env |= {"GIT_DIR": f"{sandbox.home}/{SNAPSHOT_REPOSITORY}", "GIT_WORK_TREE": sandbox.workdir}
    result = await sandbox.exec(argv, env=env, timeout=seconds, stdin=stdin, output_limit=_PATCH_LIMIT)
    if result.timed_out or result.exit_code != 0 or result.truncated:
        problem = "was too slow" if result.timed_out else "printed more than 32 MB" if result.truncated else "failed"
        message = result.stderr.decode(errors="replace").strip()[-400:]
        raise WorkspaceError(f"{what} {problem} in the sandbox: {message or f'exit {result.exit_code}'}")
    return result.stdout


BRANCH = "main"
_REPACK_SECONDS = 600.0
"""Limit of repacking the history; a large repository takes a minute."""

# Everything, apart from refs, that names commits or the repository's origin.
_REMOVE_TRACES = r"""
set -e
dir=$(git -c safe.directory='*' rev-parse --git-common-dir)
cd "$dir"
rm -rf logs worktrees refs/original refs/bisect rebase-apply rebase-merge sequencer lost-found branches
rm -f FETCH_HEAD ORIG_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD BISECT_* AUTO_MERGE gc.log description
rm -rf objects/info/commit-graph objects/info/commit-graphs
rm -f objects/pack/*.keep objects/pack/*.promisor objects/pack/multi-pack-index*
"""


async def truncate_git_history(sandbox: Sandbox, base_commit: str | None) -> None:
    """Remove everything after `base_commit` (None: HEAD) from the repository; the workspace's files stay unchanged.

    Raises `WorkspaceError` if that fails, or if later objects are still there at the end.
    """
    if base_commit is not None:
        await git(sandbox, "rev-parse", "-q", "--verify", f"{base_commit}^{{commit}}")
        # Files stay as in the image and history ends at the base; the commit below holds their differences.
        await git(sandbox, "reset", "-q", "--soft", base_commit)
    await git(sandbox, "checkout", "-q", "-B", BRANCH)
    await git(sandbox, "add", "-A")
    if (await git(sandbox, "status", "--porcelain", "--untracked-files=no")).strip():
        await git(sandbox, "commit", "-q", "-m", "The environment's own changes")
    await _delete_refs(sandbox)
    await _delete_config_sections(sandbox)
    await shell(sandbox, _REMOVE_TRACES)
    await git(sandbox, "repack", "-a", "-d", "-q", seconds=_REPACK_SECONDS)
    await git(sandbox, "prune", "--expire=now", seconds=_REPACK_SECONDS)
    await shell(sandbox, 'rm -f "$(git -c safe.directory="*" rev-parse --git-common-dir)/objects/info/alternates"')
    await _check_all_reachable(sandbox)


async def _delete_refs(sandbox: Sandbox) -> None:
    names = (await git(sandbox, "for-each-ref", "--format=%(refname)")).decode().split()
    deleted = [name for name in names if name != f"refs/heads/{BRANCH}"]
    if deleted:
        commands = "".join(f"option no-deref\ndelete {name}\n" for name in deleted)
        await git(sandbox, "update-ref", "--stdin", stdin=commands.encode())


async def _delete_config_sections(sandbox: Sandbox) -> None:
    """Delete remotes, whose addresses may contain passwords, branch tracking, and stored credentials."""
    listing = (await git(sandbox, "config", "--local", "--name-only", "--list")).decode().splitlines()
    sections = {name.rpartition(".")[0] for name in listing}
    for section in sorted(sections):
        if section.partition(".")[0] in ("remote", "branch", "url", "credential", "http", "submodule", "includeif"):
            await git(sandbox, "config", "--local", "--remove-section", section)


async def _check_all_reachable(sandbox: Sandbox) -> None:
    """Raise `WorkspaceError` if some object cannot be reached from the branch."""
    counted = (await git(sandbox, "count-objects", "-v")).decode().split("\n")
    present = sum(int(line.partition(": ")[2]) for line in counted if line.startswith(("count:", "in-pack:")))
    reachable = int((await git(sandbox, "rev-list", "--objects", "--all", "--count", seconds=_REPACK_SECONDS)).decode())
    indexed = await git(sandbox, "status", "--porcelain", "--untracked-files=no")
    if present != reachable or indexed.strip():
        raise WorkspaceError(
            f"the repository in the image still holds {present - reachable} objects outside its history, "
            "and the agent could find the fix among them"
        )
