"""Import of the hidden tests from their text, and a unittest result that reports one verdict for each test."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ExceptionInfo = Any


class TextFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the task's hidden Python files from their text, so that no file can replace them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._sources: dict[str, tuple[str, str, bool]] = {}
        for path, text in files.items():
            if path.endswith(".py"):
                package = path.endswith("/__init__.py")
                name = path[: -len("/__init__.py" if package else ".py")].replace("/", ".")
                self._sources[name] = (os.path.join(os.getcwd(), path), text, package)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._sources:
            return None
        file, _, package = self._sources[fullname]
        spec = ModuleSpec(fullname, self, origin=file, is_package=package)
        spec.has_location = True
        if package:
            spec.submodule_search_locations = [os.path.dirname(file)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        file, text, _ = self._sources[module.__name__]
        exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)


class VerdictRecorder(unittest.TestResult):
    """Reports one verdict for each test at the test's end. If subtests or clean-up fail too, the worst verdict counts.

    Tests whose method name is in `quiet` are reported too, but not logged."""

    ORDER = ("passed", "skipped", "failed", "error")

    def __init__(self, report: Callable[[str, str], None], quiet: Iterable[str] = ()) -> None:
        super().__init__()
        self._quiet = frozenset(quiet)
        self._report = report
        self._verdict: str | None = None

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._verdict = None

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        verdict = self._verdict or "error"
        self._report(test.id(), verdict)
        if test.id().rpartition(".")[2] not in self._quiet:
            print(f"{test.id()} ... {verdict}", file=sys.stderr)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._add("passed")

    def addFailure(self, test: unittest.TestCase, err: _ExceptionInfo) -> None:
        self._add("failed", test, err)

    def addError(self, test: unittest.TestCase, err: _ExceptionInfo) -> None:
        self._add("error", test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._add("skipped")

    def addExpectedFailure(self, test: unittest.TestCase, err: _ExceptionInfo) -> None:
        # Not a success: the task says which tests must pass, and the agent's code can set this mark.
        self._add("skipped")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._add("failed")

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: _ExceptionInfo) -> None:
        if err is not None:
            self._add("failed" if issubclass(err[0], test.failureException) else "error", test, err)

    def _add(self, verdict: str, test: unittest.TestCase | None = None, err: _ExceptionInfo = None) -> None:
        worst = max(self.ORDER.index(verdict), self.ORDER.index(self._verdict or "passed"))
        self._verdict = self.ORDER[worst]
        if test is not None and test.id().rpartition(".")[2] not in self._quiet:
            print(f"{verdict}: {test.id()}\n{self._exc_info_to_string(err, test)}", file=sys.stderr)  # type: ignore[attr-defined]
