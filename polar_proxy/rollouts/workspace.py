"""The task's workspace inside a sandbox, prepared before the agent starts.

The workspace contains no answer: its repository ends at the base commit, and hidden tests are not in it.

Images are made from clones, and a clone contains the future of its base commit: the branch with the fix, tags, fetched
refs, the reflog. After `truncate_git_history` one branch is left, with the ancestors of the base commit and, if the
image's files differ from the base commit, one commit with the differences. Objects that cannot be reached from this
branch are removed, and a count checks that none of them is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polar_proxy.errors import PolarError
from polar_proxy.tasks import Environment, Task
from sandboxes.base import Sandbox, SandboxKind

# The task's repository or image may have its own configuration; these options override it.
_GIT_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.autocrlf=false",
    "commit.gpgsign=false",
    "gc.auto=0",
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
_OUTPUT_LIMIT = 32 << 20
_PACK_LIMIT = 1 << 30
_PACK_REPOSITORY = ".polar-base"
"""Git repository with which the workspace is packed: a folder in HOME, removed before the agent starts."""
_BRANCH = "main"
_REPACK_SECONDS = 600.0
"""Time limit of repacking the history; a large repository takes a minute."""

# Removes the files, apart from refs and config, that name commits or the repository's origin.
_REMOVE_TRACES = r"""
set -e
dir=$(git -c safe.directory='*' rev-parse --git-common-dir)
cd "$dir"
rm -rf logs worktrees refs/original refs/bisect rebase-apply rebase-merge sequencer lost-found branches
rm -f FETCH_HEAD ORIG_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD BISECT_* AUTO_MERGE gc.log description
rm -rf objects/info/commit-graph objects/info/commit-graphs
rm -f objects/pack/*.keep objects/pack/*.promisor objects/pack/multi-pack-index*
"""
# Write no reflog, because it would show the agent how the repository was made.
_QUIET = ("-c", "core.logAllRefUpdates=false")
# Prints the id of a git tree with the workspace's files, then a pack of this tree. The attributes keep git from
# converting the files' bytes. Objects that the workspace's own repository has are not made again.
_PACK = r"""
set -e
objects=$(git -c safe.directory='*' rev-parse --git-path objects 2>/dev/null) && objects=$(cd "$objects" && pwd)
LIST_FILES >"$1.files"
export GIT_DIR="$1" GIT_WORK_TREE="$PWD"
git init -q
mkdir -p "$1/info"
echo '* -text -filter -ident -working-tree-encoding' >"$1/info/attributes"
[ -z "$objects" ] || echo "$objects" >"$1/objects/info/alternates"
git -c core.looseCompression=0 update-index -z --add --remove --stdin <"$1.files"
tree=$(git write-tree)
echo "$tree"
echo "$tree" | git pack-objects -q --revs --stdout --window=0
cd /
rm -rf "$1" "$1.files"
"""
_LIST_TRACKED = "git -c safe.directory='*' ls-files -z"
# Ignored files and files inside nested repositories count as work too, but `git add` would skip them.
_LIST_ALL = r"find . -name .git -prune -o \( -type f -o -type l \) -print0"


class WorkspaceError(PolarError):
    """The workspace could not be prepared or read."""


class TaskNotPossibleError(PolarError):
    """This kind of sandbox cannot hold this task; the text says why, and which kinds can."""


def uses_image(environment: Environment, kind: SandboxKind) -> bool:
    return kind == "docker" and (environment.image is not None or environment.build is not None)


def check_possible(task: Task, kind: SandboxKind) -> None:
    """Raise `TaskNotPossibleError` if a sandbox of this kind cannot hold the task."""
    environment = task.environment
    if environment.needs_image and kind != "docker":
        source = environment.image or f"the Dockerfile in {environment.build}"
        problem = f"its workspace comes from {source}, which a {kind} sandbox cannot use"
        raise TaskNotPossibleError(f"{task.task_id} needs docker: {problem}")
    if kind == "process" and (environment.workdir or environment.folders):
        paths = ", ".join(filter(None, (environment.workdir, *environment.folders)))
        problem = f"it uses {paths}, and a process sandbox has no file system of its own"
        raise TaskNotPossibleError(f"{task.task_id} needs bubblewrap or docker: {problem}")


async def write_task_files(task: Task, sandbox: Sandbox, bundle: Path | None) -> None:
    """Write the task's own files into an empty sandbox, for the agent or for an evaluator.

    `bundle` is the path, inside the sandbox, of the task's repository with the single ref ``refs/heads/base``.
    """
    environment = task.environment
    if bundle is not None:
        await git(sandbox, "init", "-q", "-b", _BRANCH)
        await git(sandbox, *_QUIET, "fetch", "-q", "--no-tags", str(bundle), "refs/heads/base")
        await git(sandbox, *_QUIET, "update-ref", f"refs/heads/{_BRANCH}", "FETCH_HEAD")
        await git(sandbox, *_QUIET, "reset", "-q", "--hard")
        await _shell(sandbox, "rm -f .git/FETCH_HEAD .git/ORIG_HEAD")
    elif not uses_image(environment, sandbox.kind):
        executable = set(environment.executable)
        await sandbox.write_tree({name: text.encode() for name, text in task.files.items() if name not in executable})
        for name in environment.executable:
            await sandbox.write(name, task.files[name].encode(), 0o755)


async def prepare_workspace(task: Task, sandbox: Sandbox, bundle: Path | None = None) -> None:
    """Make the agent's workspace: a repository with one branch.

    If `Environment.snapshot` is set, leave the task's files as they are instead."""
    environment = task.environment
    from_image = uses_image(environment, sandbox.kind)
    await write_task_files(task, sandbox, bundle)
    if from_image and environment.hide:
        await _shell(sandbox, 'rm -rf -- "$@"', *environment.hide)
    if environment.snapshot or bundle is not None:  # a bundle has one branch already
        return
    if from_image and await _is_repository(sandbox):
        await truncate_git_history(sandbox, environment.base_commit)
        return
    if (commit := environment.base_commit) is not None:
        raise WorkspaceError(f"{sandbox.workdir} in the image is not a git repository, so it has no commit {commit}")
    await git(sandbox, "init", "-q", "-b", _BRANCH)
    await git(sandbox, "add", "-A")
    await git(sandbox, *_QUIET, "commit", "-q", "--allow-empty", "-m", "Initial commit")


async def pack_files(sandbox: Sandbox, *, snapshot: bool) -> tuple[str, bytes]:
    """Return the id of a git tree with the workspace's files, byte by byte as they are, and a pack with this tree.

    Call it only before the agent starts: git runs inside the sandbox, where an agent could have changed what git does.
    With `snapshot`, all files are included; without it, only files that the workspace's repository tracks.
    """
    script = _PACK.replace("LIST_FILES", _LIST_ALL if snapshot else _LIST_TRACKED)
    argv = ("sh", "-c", script, "sh", f"{sandbox.home}/{_PACK_REPOSITORY}")
    output = await _run(sandbox, argv, "copying the workspace", limit=_PACK_LIMIT)
    tree, _, pack = output.partition(b"\n")
    return tree.decode(), pack


async def _is_repository(sandbox: Sandbox) -> bool:
    return (await sandbox.exec(("test", "-e", ".git"), timeout=60)).exit_code == 0


# ---------------------------------------------------------------- the history of an image's repository


async def truncate_git_history(sandbox: Sandbox, base_commit: str | None) -> None:
    """Remove everything after `base_commit` (None: HEAD) from the repository; the workspace's files stay unchanged.

    Raises `WorkspaceError` if that fails, or if later objects are still there at the end.
    """
    if base_commit is not None:
        await git(sandbox, "rev-parse", "-q", "--verify", f"{base_commit}^{{commit}}")
        # Files stay as in the image and history ends at the base; the commit below holds their differences.
        await git(sandbox, "reset", "-q", "--soft", base_commit)
    await git(sandbox, "checkout", "-q", "-B", _BRANCH)
    await git(sandbox, "add", "-A")
    if (await git(sandbox, "status", "--porcelain", "--untracked-files=no")).strip():
        await git(sandbox, "commit", "-q", "-m", "The environment's own changes")
    await _delete_refs(sandbox)
    await _delete_config_sections(sandbox)
    await _shell(sandbox, _REMOVE_TRACES)
    await git(sandbox, "repack", "-a", "-d", "-q", seconds=_REPACK_SECONDS)
    await git(sandbox, "prune", "--expire=now", seconds=_REPACK_SECONDS)
    await _shell(sandbox, 'rm -f "$(git -c safe.directory="*" rev-parse --git-common-dir)/objects/info/alternates"')
    await _check_all_reachable(sandbox)


async def _delete_refs(sandbox: Sandbox) -> None:
    names = (await git(sandbox, "for-each-ref", "--format=%(refname)")).decode().split()
    deleted = [name for name in names if name != f"refs/heads/{_BRANCH}"]
    if deleted:
        commands = "".join(f"option no-deref\ndelete {name}\n" for name in deleted)
        await git(sandbox, "update-ref", "--stdin", stdin=commands.encode())


async def _delete_config_sections(sandbox: Sandbox) -> None:
    """Delete credentials, branch tracking and remotes from the repository's configuration. The address of a remote may
    contain a password."""
    listing = (await git(sandbox, "config", "--local", "--name-only", "--list")).decode().splitlines()
    sections = {name.rpartition(".")[0] for name in listing}
    for section in sorted(sections):
        if section.partition(".")[0] in ("remote", "branch", "url", "credential", "http", "submodule", "includeif"):
            await git(sandbox, "config", "--local", "--remove-section", section)


async def _check_all_reachable(sandbox: Sandbox) -> None:
    """Raise `WorkspaceError` if an object cannot be reached from the branch, or if the index differs from the last
    commit."""
    counted = (await git(sandbox, "count-objects", "-v")).decode().split("\n")
    present = sum(int(line.partition(": ")[2]) for line in counted if line.startswith(("count:", "in-pack:")))
    reachable = int((await git(sandbox, "rev-list", "--objects", "--all", "--count", seconds=_REPACK_SECONDS)).decode())
    indexed = await git(sandbox, "status", "--porcelain", "--untracked-files=no")
    if present != reachable:
        raise WorkspaceError(
            f"the repository in the image still holds {present - reachable} objects outside its history, "
            "and the agent could find the fix among them"
        )
    if indexed.strip():
        raise WorkspaceError("the index of the repository in the image differs from its last commit")


# ---------------------------------------------------------------- commands in the sandbox


async def git(sandbox: Sandbox, *arguments: str, seconds: float = _SECONDS, stdin: bytes = b"") -> bytes:
    """Run git in the workspace; return stdout. Raises `WorkspaceError`."""
    name = next((word for word in arguments if not word.startswith("-") and "=" not in word), "")
    options = [word for option in _GIT_OPTIONS for word in ("-c", option)]
    return await _run(sandbox, ("git", *options, *arguments), f"git {name}", seconds, stdin)


async def _shell(sandbox: Sandbox, script: str, *arguments: str) -> bytes:
    """Run a shell script in the workspace, with git's fixed environment; return stdout. Raises `WorkspaceError`."""
    return await _run(sandbox, ("sh", "-c", script, "sh", *arguments), "preparing the workspace")


async def _run(
    sandbox: Sandbox,
    argv: Sequence[str],
    what: str,
    seconds: float = _SECONDS,
    stdin: bytes = b"",
    limit: int = _OUTPUT_LIMIT,
) -> bytes:
    result = await sandbox.exec(argv, env=_ENV, timeout=seconds, stdin=stdin, output_limit=limit)
    if result.timed_out:
        problem = "was too slow"
    elif result.truncated:
        problem = f"printed more than {limit >> 20} MB"
    elif result.exit_code != 0:
        problem = "failed"
    else:
        return result.stdout
    message = result.stderr.decode(errors="replace").strip()[-400:]
    raise WorkspaceError(f"{what} {problem} in the sandbox: {message or f'exit {result.exit_code}'}")
