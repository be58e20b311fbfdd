"""`pytest --processes 4`: run the test files in several processes, which are forked after the tests were collected.

pytest-xdist starts each of its processes anew. Each one imports PyTorch and the providers' SDKs and collects all tests
again, which takes a tenth of the suite's processor time with four processes. Here the parent collects once. It hands
out a file at a time, in the order of collection, and reports what the workers send.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import pytest

Indices = list[int]
"""Tests of one file: their indices in `session.items`."""

_CONTEXT = multiprocessing.get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the test files in this many processes (default: 1, the process of pytest itself)"
    parser.addoption("--processes", type=int, default=1, help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Literal[True] | None:
    """Run the collected tests in workers. Leave it to pytest if there is one process or the collection failed."""
    options = session.config.option
    if options.processes < 2 or options.collectonly or session.testsfailed:
        return None
    files = deque(
        [index for index, _ in tests]
        for _, tests in groupby(enumerate(session.items), key=lambda numbered: numbered[1].path)
    )
    workers = [_Worker(session, files) for _ in range(min(options.processes, len(files)))]
    try:
        while workers:
            ready = wait([worker.pipe for worker in workers])
            for worker in [worker for worker in workers if worker.pipe in ready]:
                if not worker.handle_message():
                    workers.remove(worker)
                    if worker.crashed:
                        workers.append(_Worker(session, files))
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


class _Worker:
    """The parent's side of a worker."""

    def __init__(self, session: pytest.Session, files: deque[Indices]) -> None:
        """`files`: the files that no worker has taken yet; shared by all workers of the session."""
        self._session = session
        self._files = files
        self._taken: list[int] = []
        """The tests that were given to the worker and have not ended."""
        self.crashed = False
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_work, args=(session, theirs))
        self.process.start()
        theirs.close()

    def handle_message(self) -> bool:
        """Handle a message of the worker. Return whether there may be more."""
        hook, config = self._session.config.hook, self._session.config
        try:
            kind, content = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            if self._taken:
                self._report_crash()
            return False
        if kind == "next":
            file = None if self._session.shouldfail or not self._files else self._files.popleft()
            self._taken += file or []
            self.pipe.send(file)
        elif kind == "ended":
            self._taken.remove(content)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=config, data=content)
            hook.pytest_runtest_logreport(report=report)
        else:
            assert kind == "warning"
            message = warnings.WarningMessage(*content.pop("warning"))
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **content})
        return True

    def _report_crash(self) -> None:
        """Report the worker's current test as failed, and give its other tests to the next worker."""
        self.crashed = True
        current, *others = self._taken
        item = self._session.items[current]
        text = f"The process of the test ended with exit code {self.process.exitcode} while the test ran."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if others:
            self._files.appendleft(others)


def _work(session: pytest.Session, pipe: Connection) -> None:
    """Run files until there are no more: the main function of a worker."""
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Forwarder(session.config, pipe))
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other workers
    capture.start_global_capturing()
    tests = _given_tests(pipe)
    current = next(tests, None)
    while current is not None:
        following = next(tests, None)
        item, next_item = (None if index is None else session.items[index] for index in (current, following))
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        pipe.send(("ended", current))
        current = following


def _given_tests(pipe: Connection) -> Iterator[int]:
    """Yield the tests of the files that the parent gives. Another file is requested when the last one is used up."""
    while True:
        pipe.send(("next", None))
        file: Indices | None = pipe.recv()
        if file is None:
            return
        yield from file


class _Forwarder:
    """The plugin that sends a worker's reports and warnings to the parent."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        # As text: the arguments of a warning need not survive being sent to another process.
        warning = (
            str(warning_message.message),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        self._pipe.send(("warning", {"warning": warning, "when": when, "nodeid": nodeid, "location": location}))
