"""git inside a sandbox, obeying no configuration but the one given here."""

from __future__ import annotations

from collections.abc import Sequence

from polar_proxy.errors import PolarError
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
"""Folder in HOME for a repository that is kept out of the workspace."""


class WorkspaceError(PolarError):
    """The workspace could not be laid out or read."""


async def git(
    sandbox: Sandbox, *arguments: str, apart: bool = False, seconds: float = _SECONDS, stdin: bytes = b""
) -> bytes:
    """Run git in the workspace; `apart`: on the repository beside it. Returns stdout; raises `WorkspaceError`."""
    name = next((word for word in arguments if not word.startswith("-") and "=" not in word), "")
    return await _run(sandbox, (*_GIT, *arguments), f"git {name}", apart, seconds, stdin)


async def shell(
    sandbox: Sandbox, script: str, *arguments: str, apart: bool = False, seconds: float = _SECONDS
) -> bytes:
    """Run a few lines of shell in the workspace, with git's environment as above. Raises `WorkspaceError`."""
    return await _run(sandbox, ("sh", "-c", script, "sh", *arguments), "preparing the workspace", apart, seconds, b"")


async def _run(sandbox: Sandbox, argv: Sequence[str], what: str, apart: bool, seconds: float, stdin: bytes) -> bytes:
    env = dict(_ENV)
    if apart:
        env |= {"GIT_DIR": f"{sandbox.home}/{SNAPSHOT_REPOSITORY}", "GIT_WORK_TREE": sandbox.workdir}
    result = await sandbox.exec(argv, env=env, timeout=seconds, stdin=stdin, output_limit=_PATCH_LIMIT)
    if result.timed_out or result.exit_code != 0 or result.truncated:
        why = "was too slow" if result.timed_out else "gave more than 32 MB" if result.truncated else "failed"
        words = result.stderr.decode(errors="replace").strip()[-400:]
        raise WorkspaceError(f"{what} {why} in the sandbox: {words or f'exit {result.exit_code}'}")
    return result.stdout
