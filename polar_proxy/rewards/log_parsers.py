"""Parsers of test runners' output: from a log to verdicts by test id.

A parser has the name by which data sets of the SWE-bench family select it (their field `log_parser`); the prefix
``parse_log_`` may be left out. Test ids are spelled as in the FAIL_TO_PASS lists of these data sets. Each parser was
written from the runner's output and the documented ids of the data sets. For any other runner give your own parser as
``module:function``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

from polar_proxy.allowed_code import NO_CODE, AllowedCode, is_code
from polar_proxy.errors import BadTaskError

Verdict = Literal["passed", "failed", "error", "skipped", "xfailed"]
LogParser = Callable[[str], Mapping[str, Verdict]]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The summary lines of -rA; with -v also the lines of the run itself, which end in the word and a percentage.
_WORDS: Mapping[str, Verdict] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
}
_PYTEST = re.compile(r"^(?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL)\s+(?P<rest>\S.*)$")
_PYTEST_VERBOSE = re.compile(r"^(?P<test>\S.*\S)\s+(?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?:\s+\[\s*\d+%\])?$")
# `SKIPPED [2] tests/test_x.py:3: reason` counts tests and names none.
_COUNT = re.compile(r"\[\d+\]")
_OPTION = re.compile(r"^(?P<test>.*?)\[(?P<option>.*)\]$")
_DJANGO = re.compile(
    r"^(?P<test>.+?) \.\.\. *(?P<words>.*?)(?P<verdict>ok|OK|FAIL|ERROR|skipped.*|expected failure|unexpected success)$"
)
_DJANGO_HEADING = re.compile(r"^(?P<word>FAIL|ERROR): (?P<test>\S+)")
_SYMPY = re.compile(r"^(?P<test>test_\w+)\s+(?P<word>ok|F|E|f|s|X)$")
_SYMPY_HEADING = re.compile(r"^_+ (?P<file>\S+\.py):(?P<test>\S+) _+$")
_GO = re.compile(r"^\s*--- (?P<word>PASS|FAIL|SKIP): (?P<test>.+) \([^()]*\)$")
_CARGO = re.compile(r"^test (?P<test>\S+)(?: - should panic)? \.\.\. (?P<word>ok|FAILED|ignored)")
_TAP = re.compile(r"^\s*(?P<word>ok|not ok) \d+(?: -)? (?P<test>.*?)(?P<directive> # (?:SKIP|TODO).*)?$", re.IGNORECASE)
_UNITTEST_START = re.compile(r"^(?P<method>\w+) \((?P<where>[\w.]+)\)(?P<rest>.*)$")
_UNITTEST_VERDICT = re.compile(r"(?:^|\.\.\. )(?P<word>ok|unexpected success|FAIL|ERROR|skipped .*|expected failure)$")


def _lines(log: str) -> Iterable[str]:
    return (_ANSI.sub("", line).rstrip() for line in log.splitlines())


def _pytest(log: str, name: Callable[[str], str]) -> dict[str, Verdict]:
    verdicts: dict[str, Verdict] = {}
    for line in _lines(log):
        if found := _PYTEST.match(line):
            rest = found["rest"]
            test = name(rest)
            if not (found["word"] == "SKIPPED" and _COUNT.fullmatch(rest.split()[0])):
                verdicts[test] = _WORDS[found["word"]]
        elif (found := _PYTEST_VERBOSE.match(line)) and "::" in found["test"]:
            verdicts.setdefault(found["test"], _WORDS[found["word"]])
    return verdicts


def parse_pytest(log: str) -> dict[str, Verdict]:
    """Parse ``pytest -rA``. Test ids in its summary are cut at their first space, as in SWE-bench's data sets."""
    return _pytest(log, lambda rest: rest.split()[0])


def parse_pytest_v2(log: str) -> dict[str, Verdict]:
    """Parse ``pytest -rA`` with complete ids, spaces included."""
    return _pytest(log, lambda rest: rest.split(" - ")[0].strip())


def parse_pytest_options(log: str) -> dict[str, Verdict]:
    """Parse ``pytest -rA``. If a parameter in a test's id is an absolute path, keep only ``/`` and the last part of the
    path, because the folders differ between machines."""

    def name(rest: str) -> str:
        test = rest.split()[0]
        found = _OPTION.match(test)
        if found is None or not found["option"].startswith("/") or found["option"].startswith("//"):
            return test
        if "*" in found["option"]:
            return test
        return f"{found['test']}[/{found['option'].rpartition('/')[2]}]"

    return _pytest(log, name)


def parse_unittest(output: str) -> dict[str, Verdict]:
    """Parse ``python -m unittest -v``. The ids have the form ``tests.test_x.TestX.test_y`` for every Python version.

    Python 3.10 prints ``test_y (tests.test_x.TestX)``; later versions print the whole id in the brackets. If a test
    prints text itself, its verdict may follow this text on a later line. If the process dies during a test, the test
    has no verdict and counts as ``error``.
    """
    verdicts: dict[str, Verdict] = {}
    current: str | None = None
    for line in output.splitlines():
        # After the first line of = come tracebacks, whose headings repeat the names.
        if line.startswith("=" * 70):
            break
        if start := _UNITTEST_START.match(line):
            method, where = start["method"], start["where"]
            current = where if where.rpartition(".")[2] == method else f"{where}.{method}"
            verdicts[current] = "error"
            line = start["rest"]
        if current is None or not (match := _UNITTEST_VERDICT.search(line)):
            continue
        # An expected failure is not a success here, because the task says which tests must pass.
        verdicts[current] = "skipped" if match["word"] == "expected failure" else _unittest_word(match["word"])
        current = None
    return verdicts


def parse_django(log: str) -> dict[str, Verdict]:
    """Parse the output of Django's test runner. The ids stay as printed: ``test_x (app.tests.TestCase)``, or the first
    line of the test's docstring.

    If a test prints text itself, its verdict may follow this text on a later line.
    """
    verdicts: dict[str, Verdict] = {}
    waiting: str | None = None
    for line in (line.strip() for line in _lines(log)):
        if found := _DJANGO.match(line):
            verdicts[found["test"]] = _unittest_word(found["verdict"])
            waiting = None
        elif " ... " in line or line.endswith(" ..."):
            waiting = line.partition(" ...")[0]
        elif found := _DJANGO_HEADING.match(line):
            verdicts.setdefault(found["test"], "failed" if found["word"] == "FAIL" else "error")
        elif waiting is not None and line in ("ok", "OK", "FAIL", "ERROR"):
            verdicts[waiting] = _unittest_word(line)
            waiting = None
    return verdicts


def _unittest_word(word: str) -> Verdict:
    if word.startswith("skipped"):
        return "skipped"
    words: dict[str, Verdict] = {"ok": "passed", "OK": "passed", "FAIL": "failed", "ERROR": "error"}
    return words.get(word, "xfailed" if word == "expected failure" else "failed")


def parse_sympy(log: str) -> dict[str, Verdict]:
    """Parse SymPy's ``bin/test -C --verbose``. The ids are function names. A failed test has a second id
    ``file.py:function``, from the heading of its traceback."""
    words: dict[str, Verdict] = {"ok": "passed", "F": "failed", "E": "error", "f": "xfailed", "s": "skipped"}
    verdicts: dict[str, Verdict] = {}
    for line in _lines(log):
        if found := _SYMPY.match(line.strip()):
            verdicts[found["test"]] = words.get(found["word"], "failed")
        elif found := _SYMPY_HEADING.match(line):
            verdicts[f"{found['file']}:{found['test']}"] = "failed"
    return verdicts


def _by_word(log: str, pattern: re.Pattern[str], words: Mapping[str, Verdict]) -> dict[str, Verdict]:
    found = filter(None, (pattern.match(line) for line in _lines(log)))
    return {match["test"]: words[match["word"]] for match in found}


def parse_gotest(log: str) -> dict[str, Verdict]:
    """Parse ``go test -v``."""
    return _by_word(log, _GO, {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"})


def parse_cargo(log: str) -> dict[str, Verdict]:
    """Parse ``cargo test``."""
    return _by_word(log, _CARGO, {"ok": "passed", "FAILED": "failed", "ignored": "skipped"})


def parse_tap(log: str) -> dict[str, Verdict]:
    """Parse the Test Anything Protocol. A test's description serves as its id.
    https://testanything.org/tap-version-14-specification.html"""
    verdicts: dict[str, Verdict] = {}
    for match in (_TAP.match(line) for line in _lines(log)):
        if match and match["test"]:
            skipped = match["directive"] is not None
            verdicts[match["test"]] = "skipped" if skipped else "passed" if match["word"] == "ok" else "failed"
    return verdicts


def parse_r2e(log: str) -> dict[str, Verdict]:
    """Parse pytest's short summary in a log of R2E-Gym. Ids have no file; dots join their parts (``TestX.test_y``)."""
    summary = log.rpartition("short test summary info")[2]
    verdicts: dict[str, Verdict] = {}
    for line in _lines(summary):
        if (found := _PYTEST.match(line)) and "::" in found["rest"]:
            verdicts[".".join(found["rest"].split(" - ")[0].split("::")[1:])] = _WORDS[found["word"]]
    return verdicts


PARSERS: Mapping[str, LogParser] = {
    "cargo": parse_cargo,
    "django": parse_django,
    "gotest": parse_gotest,
    "pytest": parse_pytest,
    "pytest_options": parse_pytest_options,
    "pytest_v2": parse_pytest_v2,
    "r2e": parse_r2e,
    "sympy": parse_sympy,
    "tap": parse_tap,
    "unittest": parse_unittest,
}
# The benchmark has one parser per repository; most of them are one of the above under another name.
_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"), "pytest"),
    **dict.fromkeys(("matplotlib", "seaborn"), "pytest"),
    **dict.fromkeys(("pydicom", "requests", "pylint"), "pytest_options"),
    **dict.fromkeys(("astropy", "scikit", "sphinx"), "pytest_v2"),
}


def check_parser(name: str) -> None:
    """Raise `BadTaskError` unless `name` is one of Polar's parsers or has the form ``module:function``. Imports
    nothing."""
    if not is_code(name):
        get_parser(name)


def get_parser(name: str, code: AllowedCode = NO_CODE) -> LogParser:
    """Return the parser called `name`, or the user's function ``module:function`` if `code` allows it. Raises
    `BadTaskError` if there is no such parser, or if the function is not allowed or cannot be loaded."""
    if is_code(name):
        return _validated(name, code.load(name))
    bare = name.removeprefix("parse_log_")
    try:
        return PARSERS[_ALIASES.get(bare, bare)]
    except KeyError:
        known = ", ".join(sorted(PARSERS))
        raise BadTaskError(f"there is no log parser {name!r}; choose one of {known}, or give module:function") from None


def _validated(name: str, parse: LogParser) -> LogParser:
    allowed = set(get_args(Verdict))

    def parsed(log: str) -> Mapping[str, Verdict]:
        verdicts = parse(log)
        if wrong := {str(verdict) for verdict in verdicts.values()} - allowed:
            raise BadTaskError(
                f"the log parser {name} returned the verdicts {sorted(wrong)}; allowed are only {sorted(allowed)}"
            )
        return verdicts

    return parsed
