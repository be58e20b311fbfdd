"""Runs this machine's git on an agent's files. Nothing that the agent wrote can change how git behaves.

Configuration, attributes and hooks come only from a repository that Polar made. Replacement objects and the environment
variables of this process have no effect. git starts in an empty folder and finds no repository by itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

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
_ERROR_BYTES = 2000


class CleanGitError(PolarError):
    """git is missing, failed or was too slow. The message is git's own error if git printed one."""


class GitOutputTooLargeError(CleanGitError):
    """git printed more than `output_limit` bytes and was killed."""


async def clean_git(*arguments: str, repository: Path | None = None, stdin: bytes = b"") -> bytes:
    """Run `run_clean_git` in a thread."""
    return await asyncio.to_thread(run_clean_git, *arguments, repository=repository, stdin=stdin)


def run_clean_git(
    *arguments: str,
    repository: Path | None = None,
    work_tree: Path | None = None,
    stdin: bytes = b"",
    exit_codes: Collection[int] = (0,),
    output_limit: int | None = None,
) -> bytes:
    """Run git in a repository that Polar made, or outside of any repository, and return its stdout. Blocking.

    Raises `CleanGitError` if git is missing, too slow, or exits with a status that is not in `exit_codes`. Raises
    `GitOutputTooLargeError` if git prints more than `output_limit` bytes; the rest is not read.
    """
    with temporary_folder() as empty, tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        env = {**_ENV, "HOME": str(empty), "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(empty))}
        if repository is not None:
            env["GIT_DIR"] = str(repository)
        if work_tree is not None:
            env["GIT_WORK_TREE"] = str(work_tree)
        command = (_program(), *arguments)
        with (
            subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, stderr=errors, cwd=work_tree or empty, env=env
            ) as process,
            _ended_after(_SECONDS, process) as expired,
        ):
            assert process.stdout is not None
            output = process.stdout.read(-1 if output_limit is None else output_limit + 1)
            if output_limit is not None and len(output) > output_limit:
                raise GitOutputTooLargeError(f"git {arguments[0]} printed more than {output_limit} bytes")
            process.wait()
        if expired.is_set():
            raise CleanGitError(f"git {arguments[0]} did not end within {_SECONDS:g} s")
        if process.returncode not in exit_codes:
            message = _tail(errors).decode(errors="replace").strip()
            raise CleanGitError(message or f"git {arguments[0]} exited with {process.returncode}")
    return output


@contextmanager
def _ended_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """Kill the process at the end of the block, or after `seconds` if the block takes longer. Yield an event that is
    set if the time ran out."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(seconds, expire)
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()
        process.kill()


def _tail(file: IO[bytes]) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _ERROR_BYTES))
    return file.read()


@cache
def _program() -> str:
    program = shutil.which("git")
    if program is None:
        raise CleanGitError(
            "git is not installed on this machine: install git, because Polar reads agents' changes with git"
        )
    return program
