"""Runs `polar` in this process, which saves the start of an interpreter for each command."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def polar(*arguments: str, printed: io.BytesIO | None = None) -> CommandResult:
    """Run a command, whose standard output `printed` receives while it runs. Unexpected errors are raised here."""
    stdout, stderr = (io.TextIOWrapper(bytes_, encoding="utf-8") for bytes_ in (printed or io.BytesIO(), io.BytesIO()))
    code = 0
    with (
        patch.object(sys, "argv", ["polar", *arguments]),
        patch.dict(os.environ),
        _restored_process(),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    for stream in (stdout, stderr):
        stream.seek(0)
    return CommandResult(code, stdout.read(), stderr.read())


def polar_serve(use: Callable[[dict[str, Any]], object], *options: str) -> CommandResult:
    """Run `polar serve --json`, call `use` in a thread with the document of the ready server, and interrupt the server.

    Errors of `use` are raised here.
    """
    return polar_serve_text(lambda text: use(orjson.loads(text)), "--json", *options)


def polar_serve_text(use: Callable[[str], object], *options: str) -> CommandResult:
    """Like `polar_serve`; `use` gets the text that is printed for people, or the document with the option --json."""
    printed, ended = io.BytesIO(), threading.Event()

    def use_and_interrupt() -> None:
        while not (printed.getvalue().endswith(b"}\n") or b"\nthen: " in printed.getvalue()):
            if ended.wait(0.01):
                return
        try:
            use(printed.getvalue().decode())
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        used = thread.submit(use_and_interrupt)
        try:
            done = polar("serve", "--port", "0", *options, printed=printed)
        finally:
            ended.set()
        used.result()
    return done


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Restore what a command sets for its process: the log, and garbage collection, which a short one ends without."""
    root = logging.getLogger()
    level, handlers, hook = root.level, root.handlers, sys.excepthook
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers, sys.excepthook = handlers, hook
        gc.enable()


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
