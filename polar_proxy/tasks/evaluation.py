"""What a task says about how it is judged. Data alone; `polar_proxy.rewards` does the judging.

Every evaluator begins with the task's own state in a sandbox that no agent has touched, to which the agent's patch is
applied. What it needs beyond that (hidden tests, scripts) gets there after the patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class HiddenTestsEvaluator:
    """`tests`: the task's `hidden_files` and `test_command`; 1 if all named tests pass, else 0."""

    kind: Literal["tests"] = "tests"
    weight: float = 1.0
    parser: str = "unittest"
    """How the output is read: a name of `log_parsers.PARSERS`, or ``module:function``."""
    before: bool = False
    """Run the tests before the patch as well: where they do not fail and pass as named, the task is at fault, and the
    rollout gets no reward rather than 0."""


@dataclass(frozen=True)
class SwebenchEvaluator:
    """`swebench`: graded as SWE-bench does; 1 if resolved, else 0. `fail_to_pass` and `pass_to_pass` are the task's."""

    kind: Literal["swebench"] = "swebench"
    weight: float = 1.0
    test_patch: str = ""
    """Applied after the files that it touches were put back to the base commit."""
    command: str = ""
    """Shell command that runs the tests; the word {test_files} stands for the paths of the test patch."""
    eval_script: str | None = None
    """The benchmark's own script, which applies the test patch itself; instead of the two above."""
    parser: str = "pytest"
    fail_only: bool = False
    """The log names only tests that fail, so that a test which is not named has passed."""
    expected: Mapping[str, str] | None = None
    """R2E-Gym: exactly these tests with exactly these verdicts, instead of the two lists."""


@dataclass(frozen=True)
class HarborEvaluator:
    """`harbor`: the task's ``tests/test.sh`` writes ``/logs/verifier/reward.txt`` or ``reward.json``."""

    tests: str
    """Folder of this machine; it appears as /tests."""
    digest: str
    """`folder_digest` of it, when the task was read: what is run is what was read."""
    kind: Literal["harbor"] = "harbor"
    weight: float = 1.0
    env: Mapping[str, str] = field(default_factory=dict)
    reward_key: str = "reward"
    """Which number of reward.json is the reward; all are kept."""


@dataclass(frozen=True)
class CommandEvaluator:
    """`command`: a program of the task's author, run in the patched workspace with `files` written over it."""

    argv: tuple[str, ...]
    kind: Literal["command"] = "command"
    weight: float = 1.0
    files: Mapping[str, str] = field(default_factory=dict)
    reward: Literal["exit_code", "last_line"] = "exit_code"
    """`exit_code`: 1 for 0, else 0. `last_line`: the last line of stdout is the reward, or ``null`` for none."""


@dataclass(frozen=True)
class PythonEvaluator:
    """`python`: a function of this machine, ``module:function``, called with the `Attempt` (`rewards.base`).

    It runs in Polar's own process, so it is code that the user trusts. It may reward single calls.
    """

    function: str
    kind: Literal["python"] = "python"
    weight: float = 1.0
    options: Mapping[str, object] = field(default_factory=dict)


Evaluator = HiddenTestsEvaluator | SwebenchEvaluator | HarborEvaluator | CommandEvaluator | PythonEvaluator
EVALUATORS: Mapping[str, type[Evaluator]] = {
    "tests": HiddenTestsEvaluator,
    "swebench": SwebenchEvaluator,
    "harbor": HarborEvaluator,
    "command": CommandEvaluator,
    "python": PythonEvaluator,
}
