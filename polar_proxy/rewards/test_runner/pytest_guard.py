"""pytest plugins that detect forged results.

`PytestGuard` is for a task's own command that runs pytest. It runs canaries, which must fail, before and after the
tests, through the same hooks as the tests, and writes a line of JSON to a file when pytest starts and when it has
ended. It changes neither what pytest prints nor its exit status.

`PytestRecorder` is for Polar's own runner (`children.py`): it reports verdicts and canaries to the judge.

If code of the patch skips a test or declares it as expected to fail, the test counts as failed. A plugin in a file of
the patch could forge the results of single tests without touching the canaries. So such a plugin discredits all
verdicts.
"""

from __future__ import annotations

import json
import os
import unittest
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .canaries import make_canaries
from .integrity import Integrity


class PatchWatcher:
    """Base class of both plugins. It watches for code of the patch that changes the results of pytest."""

    def __init__(self, integrity: Integrity) -> None:
        self._integrity = integrity
        self._plugins: list[Any] = []

    @pytest.hookimpl
    def pytest_plugin_registered(self, plugin: Any, manager: Any) -> None:
        """Remember a plugin if one of its hooks is defined in a file of the patch, or in no file.

        pytest also calls this for the plugins that were registered earlier."""
        callers = manager.get_hookcallers(plugin) or ()
        hooks = [hook.function for caller in callers for hook in caller.get_hookimpls() if hook.plugin is plugin]
        if plugin is not self and not all(map(self._integrity.is_projects_own, hooks)):
            self._plugins.append(plugin)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        error = None if call.excinfo is None else call.excinfo.value
        escapes = isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest))
        if error is not None and escapes and self._integrity.raised_by_patch(error):
            self.fail(item.nodeid)

    def fail(self, test: str) -> None:
        raise NotImplementedError

    def signs(self, manager: Any) -> list[str]:
        """Return the signs that results were forged. Call this at the end of the tests."""
        # Packages outside of the workspace may declare a plugin in it: the project is installed from its sources.
        declared = [plugin for plugin, package in manager.list_plugin_distinfo() if not _in_workspace(package)]
        foreign = any(all(plugin is not one for one in declared) for plugin in self._plugins)
        return [*self._integrity.signs([]), *(["changes_test_runner"] if foreign else [])]


class PytestGuard(PatchWatcher):
    """A pytest plugin that runs canaries before and after the tests, and writes signs of forged results to `report`."""

    def __init__(self, report: str, changed_paths: list[str]) -> None:
        super().__init__(Integrity(changed_paths))
        self._report = report
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

    def fail(self, test: str) -> None:
        self._failed.add(test)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        self._run_canaries(session)
        signs = [*self.signs(session.config.pluginmanager), *(["canary_passed"] if self._passed_canaries else [])]
        self._write({"ended": os.getpid(), "failed": sorted(self._failed), "signs": signs})

    def _run_canaries(self, session: Any) -> None:
        for number, canary in enumerate(make_canaries("pytest")):
            self._passed_canaries += run_canary(session, canary, number)[1] == "passed"

    def _write(self, event: dict[str, Any]) -> None:
        with open(self._report, "a") as file:
            file.write(json.dumps(event) + "\n")


class PytestRecorder(PatchWatcher):
    """A pytest plugin that runs canaries before and after the tests, and reports the verdict of each canary and test.

    `report` is called with the id of a test and its verdict. If a test has several verdicts, the worst is reported.
    """

    ORDER = ("passed", "xfailed", "skipped", "failed", "error")

    def __init__(
        self, report: Callable[[str, str], None], canaries: list[dict[str, str]], integrity: Integrity
    ) -> None:
        super().__init__(integrity)
        self.found: list[str] = []
        """The signs that results were forged. Empty until pytest has ended."""
        self._report = report
        self._canaries = list(enumerate(canaries))
        self._first = len(canaries) // 2
        self._verdicts: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> None:
        self._run_canaries(session, self._first)

    def fail(self, test: str) -> None:
        self._add(test, "failed")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._add(report.nodeid, "failed" if report.when == "call" else "error")
        elif report.skipped:
            self._add(report.nodeid, "xfailed" if hasattr(report, "wasxfail") else "skipped")
        elif report.when == "call":
            # An unexpected success is no success: the task says which tests must pass.
            self._add(report.nodeid, "failed" if hasattr(report, "wasxfail") else "passed")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._report(nodeid, self._verdicts.pop(nodeid, "error"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        self._run_canaries(session, len(self._canaries))
        self.found = self.signs(session.config.pluginmanager)

    def _add(self, test: str, verdict: str) -> None:
        self._verdicts[test] = max(verdict, self._verdicts.get(test, verdict), key=self.ORDER.index)

    def _run_canaries(self, session: Any, count: int) -> None:
        for number, canary in self._canaries[:count]:
            self._report(*run_canary(session, canary, number))
        del self._canaries[:count]


def _in_workspace(package: Any) -> bool:
    folder = os.path.realpath(str(package.locate_file("")))
    return (folder + "/").startswith(os.path.realpath(os.getcwd()) + "/")


def run_canary(session: Any, canary: dict[str, str], number: int) -> tuple[str, str]:
    """Run a canary through pytest's hooks, like a test. Return an id like that of a test, and the verdict."""
    files = [item.nodeid.partition("::")[0] for item in getattr(session, "items", ())] or ["test_all.py"]
    make: Any = getattr(CanaryItem, "from_parent", None)  # before pytest 5.4 there is only the constructor
    item: Any = make(session, name=canary["name"]) if make else CanaryItem(canary["name"], session)
    item.body = canary["body"]
    item._nodeid = f"{files[number % len(files)]}::{canary['name']}"
    reports = runtestprotocol(item, log=False, nextitem=None)
    return item._nodeid, "failed" if any(report.failed for report in reports) else "passed"


class CanaryItem(pytest.Item):
    """A canary, which is a test that must fail. If it passes, the results were forged."""

    body: str

    def runtest(self) -> None:
        exec(f"def {self.name}():\n    {self.body}\n{self.name}()\n", {})

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        """Return no traceback: the failure of a canary is not printed, and formatting it would take pytest 50 ms."""
        return self.name

    def reportinfo(self) -> tuple[str, int, str]:
        return self.nodeid.partition("::")[0], 0, self.name
