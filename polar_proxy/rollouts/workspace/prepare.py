"""The task's workspace inside a sandbox: prepared before the agent starts, read as a patch after it ends.

The workspace contains no answer: its repository ends at the base commit, and hidden tests are not in it. The agent's
work is the difference from a commit that was made before the agent started.
"""

from __future__ import annotations

from pathlib import Path

from polar_proxy.errors import PolarError
from polar_proxy.rollouts.workspace.git import SNAPSHOT_REPOSITORY, WorkspaceError, git, shell, truncate_git_history
from polar_proxy.tasks import Environment, Task
from sandboxes import Sandbox
from sandboxes.base import SandboxKind

# No reflog, so that the agent's repository does not show how it was made.
_QUIET = ("-c", "core.logAllRefUpdates=false")
# Ignored files and files inside nested repositories count as work too, but `git add` would skip them.
_SNAPSHOT_FILES = (
    r"{ git ls-files -z; find . -name .git -prune -o \( -type f -o -type l \) -print0; }"
    r" | git update-index -z --add --remove --replace --stdin"
)


class TaskNotPossibleError(PolarError):
    """This kind of sandbox cannot hold this task; the text says why, and which kinds can."""


def uses_image(environment: Environment, kind: SandboxKind) -> bool:
    """Return whether the workspace comes from an image."""
    return kind == "docker" and (environment.image is not None or environment.build is not None)


def unsupported_reason(task: Task, kind: SandboxKind) -> str | None:
    """Return why a sandbox of this kind cannot hold the task, or None."""
    environment = task.environment
    if environment.needs_image and kind != "docker":
        source = environment.image or f"the Dockerfile in {environment.build}"
        return f"{task.task_id} needs docker: its workspace comes from {source}, which {kind} cannot make"
    if kind == "process" and (environment.workdir or environment.folders):
        paths = ", ".join(filter(None, (environment.workdir, *environment.folders)))
        return (
            f"{task.task_id} needs bubblewrap or docker: it uses {paths}, "
            "and a process sandbox has no file system of its own"
        )
    return None


async def write_task_files(task: Task, sandbox: Sandbox, bundle: Path | None) -> None:
    """Write the task's own files into an empty sandbox, for the agent or for an evaluator.

    `bundle` is the path, inside the sandbox, of the task's repository with the single ref ``refs/heads/base``.
    """
    environment = task.environment
    if bundle is not None:
        await git(sandbox, "init", "-q", "-b", "main")
        await git(sandbox, *_QUIET, "fetch", "-q", "--no-tags", str(bundle), "refs/heads/base")
        await git(sandbox, *_QUIET, "update-ref", "refs/heads/main", "FETCH_HEAD")
        await git(sandbox, *_QUIET, "reset", "-q", "--hard")
        await shell(sandbox, "rm -f .git/FETCH_HEAD .git/ORIG_HEAD")
    elif not uses_image(environment, sandbox.kind):
        executable = set(environment.executable)
        await sandbox.write_tree({name: text.encode() for name, text in task.files.items() if name not in executable})
        for name in environment.executable:
            await sandbox.write(name, task.files[name].encode(), 0o755)


async def prepare_workspace(task: Task, sandbox: Sandbox, bundle: Path | None = None) -> str:
    """Make the agent's workspace; return the commit or tree from which the patch is computed."""
    environment = task.environment
    await write_task_files(task, sandbox, bundle)
    if uses_image(environment, sandbox.kind) and environment.hide:
        await shell(sandbox, 'rm -rf -- "$@"', *environment.hide)
    if environment.snapshot:
        await git(sandbox, "init", "-q", "-b", "main", snapshot=True)
        # Store bytes unchanged, whatever the workspace's .gitattributes say.
        await sandbox.write(f"{sandbox.home}/{SNAPSHOT_REPOSITORY}/info/attributes", b"* -text -filter -ident\n")
        return await _snapshot_tree(sandbox)
    if bundle is not None:
        return await _head(sandbox)
    if uses_image(environment, sandbox.kind) and await _is_repository(sandbox):
        await truncate_git_history(sandbox, environment.base_commit)
        return await _head(sandbox)
    if environment.base_commit is not None:
        raise WorkspaceError(
            f"{sandbox.workdir} in the image is not a git repository, so it has no commit {environment.base_commit}"
        )
    await git(sandbox, "init", "-q", "-b", "main")
    await git(sandbox, "add", "-A")
    await git(sandbox, *_QUIET, "commit", "-q", "--allow-empty", "-m", "Initial commit")
    return await _head(sandbox)


async def read_patch(sandbox: Sandbox, base: str, *, snapshot: bool = False) -> tuple[bytes, str | None]:
    """Return the agent's changes since `base`, committed or not, as a binary diff; or an empty one and the error."""
    diff = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    try:
        if snapshot:
            return await git(sandbox, *diff, base, await _snapshot_tree(sandbox), snapshot=True), None
        await git(sandbox, "add", "-A")
        return await git(sandbox, *diff, "--cached", base), None
    except WorkspaceError as error:  # the agent broke the repository, which is a result and not an infrastructure error
        return b"", str(error)


async def _snapshot_tree(sandbox: Sandbox) -> str:
    """Add the workspace to the snapshot repository and return its tree object."""
    await shell(sandbox, _SNAPSHOT_FILES, snapshot=True)
    return (await git(sandbox, "write-tree", snapshot=True)).decode().strip()


async def _head(sandbox: Sandbox) -> str:
    return (await git(sandbox, "rev-parse", "HEAD")).decode().strip()


async def _is_repository(sandbox: Sandbox) -> bool:
    return (await sandbox.exec(("test", "-e", ".git"), timeout=60)).exit_code == 0
