"""Runs this machine's git on what an agent left, so that nothing that an agent wrote can change git's behaviour.

No configuration, attributes, hooks, replaced objects or environment variables take part, apart from those of a
repository that Polar made. git starts in an empty folder and finds no repository by itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path

from polar_proxy.errors import PolarError
from polar_proxy.temporary import temporary_folder

_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_SECONDS = 120.0


class CleanGitError(PolarError):
    """git refused its input or was too slow; the text is git's error."""


async def clean_git(
    *arguments: str,
    repository: Path | None = None,
    work_tree: Path | None = None,
    stdin: bytes = b"",
    exit_codes: Collection[int] = (0,),
) -> bytes:
    """Run git on a repository of Polar's own, or outside of any; return stdout. Raises `CleanGitError` for an exit
    status that is not in `exit_codes`."""
    return await asyncio.to_thread(_run, arguments, repository, work_tree, stdin, exit_codes)


def _run(
    arguments: tuple[str, ...],
    repository: Path | None,
    work_tree: Path | None,
    stdin: bytes,
    exit_codes: Collection[int],
) -> bytes:
    with temporary_folder() as empty:
        env = {**_ENV, "HOME": str(empty), "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(empty))}
        if repository is not None:
            env["GIT_DIR"] = str(repository)
        if work_tree is not None:
            env["GIT_WORK_TREE"] = str(work_tree)
        command = (_program(), *arguments)
        try:
            done = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                cwd=work_tree or empty,
                env=env,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CleanGitError(f"git {arguments[0]} did not end within {_SECONDS:g} s") from error
    if done.returncode not in exit_codes:
        message = done.stderr.decode(errors="replace").strip()[-2000:]
        raise CleanGitError(message or f"git {arguments[0]} exited with {done.returncode}")
    return done.stdout


@cache
def _program() -> str:
    program = shutil.which("git")
    if program is None:
        raise CleanGitError("git is not installed on this machine; Polar reads the agents' work with it")
    return program
