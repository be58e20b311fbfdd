"""Runs `polar` in this process, which saves the start of an interpreter for each command."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import orjson

from polar_proxy.cli import main


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command."""

    exit_code: int
    stdout: str
    stderr: str


def polar(*arguments: str) -> CommandResult:
    """Run a command. Unexpected errors are raised here."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    code = 0
    with (
        patch.object(sys, "argv", ["polar", *arguments]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            gc.enable()  # a short command ends without it
    for stream in (stdout, stderr):
        stream.seek(0)
    return CommandResult(code, stdout.read(), stderr.read())


def polar_ok(*arguments: str) -> str:
    """Return the standard output of a command that succeeds."""
    done = polar(*arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def polar_json(*arguments: str, exit_code: int = 0) -> Any:
    """Return the JSON document that a command prints."""
    done = polar(*arguments, "--json")
    assert done.exit_code == exit_code, done.stderr
    return orjson.loads(done.stdout)


def polar_error(*arguments: str) -> str:
    """Return the error text of a command that fails: it prints nothing else."""
    done = polar(*arguments)
    assert done.exit_code in (1, 2), done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr
