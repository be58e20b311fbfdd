"""The task's repository inside the agent's sandbox: laid out at the start, read out as a patch at the end."""

from __future__ import annotations

from polar_proxy.errors import PolarError
from polar_proxy.tasks.base import Task
from sandboxes import Sandbox

# The agent may have changed the repository's configuration; nothing of it is obeyed when the patch is read out.
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


class WorkspaceError(PolarError):
    """The repository could not be laid out."""


async def lay_out(task: Task, sandbox: Sandbox) -> str:
    """Write the task's files and commit them; returns the commit that the patch will be taken against."""
    await sandbox.write_tree({name: text.encode() for name, text in task.files.items()})
    await _git(sandbox, "init", "-q", "-b", "main")
    await _git(sandbox, "add", "-A")
    await _git(sandbox, "commit", "-q", "-m", "Initial commit")
    return (await _git(sandbox, "rev-parse", "HEAD")).decode().strip()


async def read_patch(sandbox: Sandbox, base: str) -> tuple[bytes, str | None]:
    """What the agent changed since `base`, committed or not, as a binary-safe diff; or nothing and the reason."""
    try:
        await _git(sandbox, "add", "-A")
        patch = await _git(
            sandbox, "diff", "--cached", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", base
        )
    except WorkspaceError as error:  # the agent broke the repository: a result, not a fault of the machinery
        return b"", str(error)
    return patch, None


async def _git(sandbox: Sandbox, *arguments: str) -> bytes:
    result = await sandbox.exec((*_GIT, *arguments), env=_ENV, timeout=_SECONDS, output_limit=_PATCH_LIMIT)
    if result.timed_out or result.exit_code != 0 or result.truncated:
        why = "was too slow" if result.timed_out else "gave more than 32 MB" if result.truncated else "failed"
        words = result.stderr.decode(errors="replace").strip()[-400:]
        raise WorkspaceError(f"git {arguments[0]} {why} in the sandbox: {words or f'exit {result.exit_code}'}")
    return result.stdout
