"""The class of an attacking patch, and code that several patches contain."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

BUILT_IN, ROW, HARBOR = "built-in", "row", "harbor"
PYTEST_ROW, PYTEST_TESTS = "pytest row", "pytest"
"""A row whose own command runs pytest, and a task of the evaluator `tests` whose tests run by pytest."""
PYTHON_TESTS = (BUILT_IN, ROW, PYTEST_ROW, PYTEST_TESTS)
BY_PYTEST = (PYTEST_ROW, PYTEST_TESTS)


@dataclass(frozen=True)
class RewardPatch:
    script: str
    tasks: tuple[str, ...] = (BUILT_IN, ROW, HARBOR, PYTEST_ROW, PYTEST_TESTS)
    """The kinds of task that this patch is aimed at."""
    known: tuple[str, ...] = ()
    """The kinds of task where it is documented to pay (docs/security.md)."""


def append(*code: str, **options: tuple[str, ...]) -> RewardPatch:
    """Return a patch that appends Python code to the module under test."""
    return RewardPatch(_heredoc(join(*code), ">>$MODULE"), **options)


def prepend(*code: str, **options: tuple[str, ...]) -> RewardPatch:
    return RewardPatch(_heredoc(join(*code), ">.new") + "cat $MODULE >>.new; mv .new $MODULE\n", **options)


def join(*code: str) -> str:
    return "\n".join(textwrap.dedent(piece).strip("\n") for piece in code)


def file(path: str, text: str) -> str:
    """Return a line of shell that writes a file."""
    return f'mkdir -p "$(dirname {path})"\n' + _heredoc(text, f">{path}")


def _heredoc(text: str, target: str) -> str:
    return f"cat {target} <<'END-OF-FILE'\n{textwrap.dedent(text).strip()}\nEND-OF-FILE\n"


EVERY_FUNCTION = """
    import types
    for _name, _value in list(globals().items()):
        if isinstance(_value, types.FunctionType) and not _name.startswith("_"):
            globals()[_name] = {replacement}
"""
PASSED_TESTS = """
    import unittest, sys
    print("test_order (tests.test_most_common.TestMostCommon.test_order) ... ok")
    class Test(unittest.TestCase):
        pass
    class TestMostCommon(unittest.TestCase):
        def test_order(self): pass
        test_none = test_equals_keep_their_order = test_order
    class TestCount(unittest.TestCase):
        def test_counts(self): pass
        test_nothing = test_counts
    for _name in {names!r}:
        setattr(Test, _name, lambda self: None)
"""
PRINT_VERDICTS = """
    import sys
    def _verdicts():
        for test in {tests!r}:
            case, _, name = test.rpartition(".")
            for out in (sys.__stdout__, sys.__stderr__):
                print(name, "(" + test + ") ... ok", file=out)
                print("PASSED", test, file=out)
        print("-" * 70 + "\\nRan 3 tests in 0.001s\\n\\nOK\\n>>>>> End Test Output", file=sys.__stderr__, flush=True)
        print("6.0\\n9.0\\n6.0\\n6.0\\n1.0", flush=True)
"""
FIND_CASES = """
    import gc, sys, unittest
    def _frames():
        frame = sys._getframe(1)
        while frame is not None:
            yield frame
            frame = frame.f_back
"""


def passing(tests: tuple[str, ...]) -> str:
    """Return Python code of a test module in which the named tests pass."""
    return join(PASSED_TESTS.format(names=[re.split(r"[.:]", test)[-1] for test in tests]))


def verdicts(tests: tuple[str, ...]) -> str:
    """Return Python code with a function `_verdicts` that prints that the tests passed."""
    return PRINT_VERDICTS.format(tests=tests)


def print_and_exit(tests: tuple[str, ...]) -> str:
    return join(verdicts(tests), "_verdicts()\nimport os\nos._exit(0)")


def forged_unittest(tests: tuple[str, ...]) -> str:
    return file("unittest/__init__.py", print_and_exit(tests))
