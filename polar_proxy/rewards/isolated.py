"""Runs tests of unittest and pytest inside an evaluation sandbox, with Polar's own test runner (`test_runner/`).

The report is signed with a nonce that only one process of the runner, the judge, receives. If the report is missing or
its signature is wrong, all tests count as failed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from polar_proxy.rewards.base import Workspace
from polar_proxy.rewards.log_parsers import Verdict
from polar_proxy.types import Json

TestStyle = Literal["values", "unittest", "pytest"]
_PARTS: Mapping[TestStyle, tuple[str, ...]] = {
    "values": ("links", "verdicts", "values", "judge"),
    "unittest": ("links", "verdicts", "canaries", "integrity", "children", "judge"),
    "pytest": ("task_path", "links", "verdicts", "canaries", "integrity", "pytest_guard", "children", "judge"),
}
_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")
_QUIET_FLAGS = {"-v", "--verbose", "-q", "--quiet", "-b", "--buffer"}
_PYTEST_FLAGS = re.compile(r"-[vqsl]+|-r\w+|-[pW]\S+|--(?:verbose|quiet|showlocals|no-header)|--[\w-]+=\S+")
_PYTEST_OPTIONS = {"-p", "-W", "-o", "-c", "-k", "-m"}
"""Options of pytest whose value is the next word of the command."""
_BOOTSTRAP = """\
import sys, types
def load(name, source):
    module = types.ModuleType(name)
    module.__package__ = "polar_test_runner"
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(source, "<" + name + ">", "exec"), module.__dict__)
load("polar_test_runner", "")
"""


@dataclass(frozen=True)
class TestPlan:
    """How the runner runs a task's tests. In the styles `unittest` and `pytest`, each of `groups` runs in its own
    process."""

    __test__ = False

    python: str
    style: TestStyle
    groups: tuple[tuple[str, ...], ...]
    options: tuple[str, ...] = ()
    """Options of pytest."""


@dataclass(frozen=True)
class TestReport:
    """The verdicts by test id, the log for people, whether the time ran out, and the signs of forgery."""

    __test__ = False

    verdicts: Mapping[str, Verdict]
    log: bytes
    timed_out: bool
    signs: tuple[str, ...] = ()


def plan_unittest(command: Sequence[str]) -> TestPlan | None:
    """Return the plan by which Polar's runner runs the same tests as this command, or None.

    Only ``python -m unittest`` with names of modules, classes or tests has a plan; other commands are run as they are.
    """
    python, *rest = command
    if rest[:2] != ["-m", "unittest"] or not _PYTHON.fullmatch(python):
        return None
    names = [word for word in rest[2:] if word not in _QUIET_FLAGS]
    if not names or any(not re.fullmatch(r"[\w.]+", name) for name in names):
        return None
    return TestPlan(python, "unittest", tuple((name,) for name in names))


def plan_pytest(command: Sequence[str]) -> TestPlan | None:
    """Return the plan by which Polar's runner runs the tests of a command ``python -m pytest FILE ...``.

    Return None for any other command. An option that is not known here may need pytest's own process, so a command with
    such an option also gives None.
    """
    python, *rest = command
    if rest[:2] != ["-m", "pytest"] or not _PYTHON.fullmatch(python):
        return None
    options: list[str] = []
    files: dict[str, list[str]] = {}
    words = iter(rest[2:])
    for word in words:
        if word in _PYTEST_OPTIONS:
            options += [word, next(words, "")]
        elif not word.startswith("-"):
            files.setdefault(word.partition("::")[0], []).append(word)
        elif _PYTEST_FLAGS.fullmatch(word):
            options.append(word)
        else:
            return None
    return TestPlan(python, "pytest", tuple(map(tuple, files.values())), tuple(options)) if files else None


def plan_shell_command(command: str) -> TestPlan | None:
    """Like `plan_unittest`, for a shell command that is a single program with arguments."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    plain = words and "\n" not in command.strip() and not any(letter in command for letter in ";&|<>$`(){}*?~#=")
    return plan_unittest(words) if plain else None


async def run_tests(
    workspace: Workspace,
    plan: TestPlan,
    hidden_files: Mapping[str, str],
    changed_paths: Sequence[str],
    seconds: float,
) -> TestReport:
    """Run the tests in the patched workspace. `changed_paths`: the files that the patch changed.

    Hidden Python files are imported from their text, not from files in the workspace.
    """
    nonce = secrets.token_bytes(32)
    job = {
        "nonce": nonce.hex(),
        "style": plan.style,
        "groups": plan.groups,
        "options": plan.options,
        "hidden_files": dict(hidden_files),
        "changed_paths": changed_paths,
    }
    argv = (plan.python, "-I", "-B", "-u", "-c", runner_source(plan.style))
    result = await workspace.exec(argv, stdin=json.dumps(job).encode(), timeout=seconds)
    report = _read_report(result.stdout, nonce)
    if report is None or result.timed_out:
        reason = "the time ran out" if result.timed_out else f"it exited with {result.exit_code}"
        line = f"\nthe test runner gave no report: {reason}. All tests have failed.\n".encode()
        return TestReport({}, result.stderr + line, result.timed_out)
    return TestReport(report["verdicts"], result.stderr, False, tuple(report["signs"]))


@cache
def runner_source(style: TestStyle) -> str:
    """Return the runner, with the modules that this style of tests needs, as one program for ``python -c``."""
    return runner_parts(_PARTS[style]) + 'sys.modules["polar_test_runner.judge"].main()\n'


def runner_parts(names: Sequence[str]) -> str:
    """Return a program that loads these modules of the runner, in this order."""
    folder = Path(__file__).parent / "test_runner"
    loads = [f"load({f'polar_test_runner.{name}'!r}, {(folder / f'{name}.py').read_text()!r})\n" for name in names]
    return _BOOTSTRAP + "".join(loads)


def _read_report(output: bytes, nonce: bytes) -> Json | None:
    """Return the report, or None if it is missing or not signed with the nonce."""
    signature, _, report = output.partition(b"\n")
    expected = hmac.new(nonce, report, hashlib.sha256).hexdigest().encode()
    return json.loads(report) if hmac.compare_digest(signature, expected) else None
