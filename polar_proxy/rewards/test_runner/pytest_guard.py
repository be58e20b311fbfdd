"""A pytest plugin that detects forged results when a task's own command runs pytest.

It runs canaries, which must fail, before and after the tests, through the same hooks as the tests, and writes a line of
JSON to a file when pytest starts and when it has ended. It changes neither what pytest prints nor its exit status.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .canaries import make_canaries
from .integrity import Integrity


class PytestGuard:
    """A pytest plugin that runs canaries before and after the tests, and writes signs of forged results to `report`."""

    def __init__(self, report: str, changed_paths: list[str]) -> None:
        self._report = report
        self._integrity = Integrity(changed_paths)
        self._failed: set[str] = set()
        self._passed_canaries = 0

    def start(self, config: Any) -> None:
        """Record that pytest has started, and register the other hooks; called as the hook `pytest_configure`."""
        # Neither a pytest that tests start nor a worker of pytest-xdist is watched.
        os.environ.pop("PYTEST_ADDOPTS", None)
        if not hasattr(config, "workerinput"):
            self._write({"started": os.getpid()})
            config.pluginmanager.register(self, "polar_guard_hooks")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> None:
        self._run_canaries(session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        self._run_canaries(session)
        signs = [*self._integrity.signs([]), *(["canary_passed"] if self._passed_canaries else [])]
        self._write({"ended": os.getpid(), "failed": sorted(self._failed), "signs": signs})

    def _run_canaries(self, session: Any) -> None:
        files = [item.nodeid.partition("::")[0] for item in getattr(session, "items", ())] or ["test_all.py"]
        for number, canary in enumerate(make_canaries("pytest")):
            make: Any = getattr(CanaryItem, "from_parent", None)  # before pytest 5.4 there is only the constructor
            item: Any = make(session, name=canary["name"]) if make else CanaryItem(canary["name"], session)
            item.body = canary["body"]
            item._nodeid = f"{files[number % len(files)]}::{canary['name']}"
            reports = runtestprotocol(item, log=False, nextitem=None)
            self._passed_canaries += not any(report.failed for report in reports)

    def _write(self, event: dict[str, Any]) -> None:
        with open(self._report, "a") as file:
            file.write(json.dumps(event) + "\n")


class CanaryItem(pytest.Item):
    """A canary, which is a test that must fail. If it passes, the results were forged."""

    body: str

    def runtest(self) -> None:
        exec(f"def {self.name}():\n    {self.body}\n{self.name}()\n", {})

    def reportinfo(self) -> tuple[str, int, str]:
        return self.nodeid.partition("::")[0], 0, self.name
