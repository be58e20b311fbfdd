"""History that ends at the base commit, in a repository which an image brought along.

Images are made from clones, and a clone holds the future of its base commit: the branch with the fix, tags, what was
fetched, what the reflog remembers. Afterwards one branch is left, with the ancestors of the base commit and, where the
image's files differ from it, one commit with those. No object is left that cannot be reached from there: they are
counted.
"""

from __future__ import annotations

from polar_proxy.rollouts.git import WorkspaceError, git, shell
from sandboxes import Sandbox

BRANCH = "main"
_SECONDS = 600.0
"""Limit of packing the history anew; a large repository takes a minute."""

# Everything besides the refs that names commits or says where the repository came from.
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
    """Leave the workspace's files as they are and its repository with nothing after `base_commit` (None: HEAD).

    Raises `WorkspaceError` where that cannot be done, or something later is still there at the end.
    """
    if base_commit is not None:
        await git(sandbox, "rev-parse", "-q", "--verify", f"{base_commit}^{{commit}}")
        # Files as in the image, history as at the base: what the image did to them is told by the commit below.
        await git(sandbox, "reset", "-q", "--soft", base_commit)
    await git(sandbox, "checkout", "-q", "-B", BRANCH)
    await git(sandbox, "add", "-A")
    if (await git(sandbox, "status", "--porcelain", "--untracked-files=no")).strip():
        await git(sandbox, "commit", "-q", "-m", "The environment's own changes")
    await _forget_refs(sandbox)
    await _forget_sections(sandbox)
    await shell(sandbox, _REMOVE_TRACES)
    await git(sandbox, "repack", "-a", "-d", "-q", seconds=_SECONDS)
    await git(sandbox, "prune", "--expire=now", seconds=_SECONDS)
    await shell(sandbox, 'rm -f "$(git -c safe.directory="*" rev-parse --git-common-dir)/objects/info/alternates"')
    await _check(sandbox)


async def _forget_refs(sandbox: Sandbox) -> None:
    names = (await git(sandbox, "for-each-ref", "--format=%(refname)")).decode().split()
    doomed = [name for name in names if name != f"refs/heads/{BRANCH}"]
    if doomed:
        commands = "".join(f"option no-deref\ndelete {name}\n" for name in doomed)
        await git(sandbox, "update-ref", "--stdin", stdin=commands.encode())


async def _forget_sections(sandbox: Sandbox) -> None:
    """Remotes with their addresses, which may hold passwords, what branches followed, and stored credentials."""
    listing = (await git(sandbox, "config", "--local", "--name-only", "--list")).decode().splitlines()
    sections = {name.rpartition(".")[0] for name in listing}
    for section in sorted(sections):
        if section.partition(".")[0] in ("remote", "branch", "url", "credential", "http", "submodule", "includeif"):
            await git(sandbox, "config", "--local", "--remove-section", section)


async def _check(sandbox: Sandbox) -> None:
    """Every object there is can be reached from the branch."""
    counted = (await git(sandbox, "count-objects", "-v")).decode().split("\n")
    there = sum(int(line.partition(": ")[2]) for line in counted if line.startswith(("count:", "in-pack:")))
    reachable = int((await git(sandbox, "rev-list", "--objects", "--all", "--count", seconds=_SECONDS)).decode())
    indexed = await git(sandbox, "status", "--porcelain", "--untracked-files=no")
    if there != reachable or indexed.strip():
        raise WorkspaceError(
            f"the repository in the image still holds {there - reachable} objects that its history does not: "
            "the agent could find the fix among them"
        )
