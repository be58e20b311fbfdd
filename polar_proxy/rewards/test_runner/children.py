"""Tests in children: each group of tests runs in a forked child, together with the agent's code and with canaries,
which are tests that must fail (`canaries.py`)."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from .integrity import Integrity
from .links import MESSAGE_LIMIT, Link, LinkClosedError, write_all
from .verdicts import TextFinder, VerdictRecorder

_END_LINE = b'["end", '


def run_children(job: dict[str, Any], link: Link) -> None:
    """Receive groups of tests until the judge ends. Run each group in a forked child, one after the other."""
    while True:
        try:
            group = link.receive()
        except LinkClosedError:
            return
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            link.close()
            os.setsid()
            _run_child(job, group, writing)
        os.close(writing)
        data, status = _collect(child, reading)
        link.send({"status": status, "events": _parse_events(data)})


def _collect(child: int, reading: int) -> tuple[bytes, int]:
    """Wait until a child has ended, and return its report and exit status. Then kill the rest of its process group.

    If the child never ends, the wait lasts until the time limit of the tests stops the whole runner.
    """
    data = b""
    # A program that the child left running may keep the pipe open after the last line.
    while not data.rpartition(b"\n")[0].rpartition(b"\n")[2].startswith(_END_LINE) and (
        part := os.read(reading, 1 << 16)
    ):
        data += part
        if len(data) > MESSAGE_LIMIT:
            os.kill(child, signal.SIGKILL)
            break
    os.close(reading)
    _, status = os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return data, status


def _parse_events(data: bytes) -> list[list[Any]]:
    """Return the events in the child's report, one per line.

    At the first line that is not an event, end the list with `["broken"]`, which makes the report unusable.
    """
    events: list[list[Any]] = []
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not _is_event(event):
            return [*events, ["broken"]]
        events.append(event)
    return events


def _is_event(event: Any) -> bool:
    if not isinstance(event, list) or not event:
        return False
    if event[0] == "end":
        return len(event) == 2 and isinstance(event[1], list) and all(isinstance(sign, str) for sign in event[1])
    return event[0] == "test" and len(event) == 3 and all(isinstance(part, str) for part in event)


# ---------------------------------------------------------------- in the child


def _run_child(job: dict[str, Any], group: dict[str, Any], writing: int) -> None:
    """Run one group of tests, then end the process without running the exit hooks of the tested code."""
    status = 1

    def report(*event: Any) -> None:
        write_all(writing, json.dumps(event).encode() + b"\n")

    try:
        gc.disable()  # `Integrity` looks at the classes that the tests made
        integrity = Integrity(job["changed_paths"])
        _prepare_path(group["tests"])
        sys.meta_path.insert(0, TextFinder(job["hidden_files"]))
        if job["style"] == "pytest":
            signs = _run_pytest(job, group, report, integrity)
        else:
            signs = integrity.signs(_run_unittest(group, report))
        report("end", signs)
        status = 0
    except BaseException:  # noqa: BLE001 (the tested code may raise anything, and none of it may run the exit hooks)
        traceback.print_exc()
    finally:
        os._exit(status)


def _prepare_path(tests: list[str]) -> None:
    """Add the workspace and the task's PYTHONPATH to the import path.

    They come after the standard library, so that they do not shadow its modules. But if a test's package has the same
    name as a module of the standard library, they come first.
    """
    library = os.path.dirname(os.__file__)
    places = [index for index, path in enumerate(sys.path) if path.startswith(library) and "-packages" not in path]
    # A project may have a package that is called like one of the library, such as `test`.
    shadowing = any(os.path.exists(os.path.join(library, re.split(r"[./]", test)[0])) for test in tests)
    first = 0 if shadowing or not places else places[-1] + 1
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # the task's own variable
    sys.path[first:first] = [os.getcwd(), *(os.path.abspath(path) for path in given if path)]


def _run_unittest(group: dict[str, Any], report: Callable[..., None]) -> list[unittest.TestCase]:
    """Run canaries, the group's tests and more canaries, and report their verdicts. Return the group's tests."""
    recorder = VerdictRecorder(
        lambda test, verdict: report("test", test, verdict), {canary["name"] for canary in group["canaries"]}
    )
    tests = list(_flatten(unittest.defaultTestLoader.loadTestsFromNames(group["tests"])))
    module = type(tests[0]).__module__ if tests else "tests"
    canaries = [_canary_case(canary, module) for canary in group["canaries"]]
    half = len(canaries) // 2
    unittest.TestSuite([*canaries[:half], *tests, *canaries[half:]]).run(recorder)
    return tests


def _run_pytest(
    job: dict[str, Any], group: dict[str, Any], report: Callable[..., None], integrity: Integrity
) -> list[str]:
    """Run the group's tests by pytest, with canaries, and report their verdicts. Return the signs of forgery.

    The only plugins that pytest loads are its built-in plugins and the plugins that the task's options name."""
    import pytest

    from .pytest_guard import PytestRecorder

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    recorder = PytestRecorder(lambda test, verdict: report("test", test, verdict), group["canaries"], integrity)
    pytest.main([*job["options"], *group["tests"]], plugins=[recorder])
    return recorder.found


def _flatten(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _flatten(item)
        else:
            yield item


def _canary_case(canary: dict[str, str], module: str) -> unittest.TestCase:
    space: dict[str, Any] = {}
    exec(f"def {canary['name']}(self):\n    {canary['body']}\n", space)
    members = {canary["name"]: space[canary["name"]], "__module__": module}
    case: unittest.TestCase = type(canary["group"], (unittest.TestCase,), members)(canary["name"])
    return case
