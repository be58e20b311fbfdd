"""When a group is complete, and when an agent is stopped early."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from polar_proxy.errors import BadTaskError, UsageError
from polar_proxy.rollouts.stopping import (
    GROUP_POLICIES,
    NAMES,
    EarlyStopCheck,
    early_stop_check,
    get_group_policy,
    stop_early,
)
from sandboxes.base import SandboxError


@dataclass(frozen=True)
class PolicyRollout:
    status: str
    reward: float | None = None
    completion_tokens: int = 100
    incomplete: bool = False


WON, LOST = PolicyRollout("done", 1.0), PolicyRollout("done", 0.0)
RUNS, WAITS, FAILED = PolicyRollout("running"), PolicyRollout("queued"), PolicyRollout("failed")
NO_REWARD, BROKEN, SLOW = (
    PolicyRollout("done", None),
    PolicyRollout("done", 1.0, incomplete=True),
    PolicyRollout("timed_out", 0.0),
)
SPENT = PolicyRollout("running", completion_tokens=900)


@pytest.mark.parametrize(
    ("name", "group_size", "rollouts", "reason"),
    [
        ("wait_for_all", 1, [WON, LOST, RUNS], None),
        ("first_n", 2, [WON, RUNS, RUNS], None),
        ("first_n", 2, [WON, LOST, RUNS], "the first 2 have ended"),
        ("first_n", 2, [WON, SLOW, RUNS], "the first 2 have ended"),  # it counts in the baseline
        ("first_n", 2, [WON, FAILED, NO_REWARD, BROKEN, RUNS], None),
        ("first_n_with_spread", 2, [WON, WON, RUNS], None),
        ("first_n_with_spread", 2, [WON, LOST, RUNS], "the first 2 have ended"),
        ("first_n_with_spread", 2, [WON, WON, WON, LOST], "the first 2 have ended"),
        ("first_n_with_spread", 3, [WON, LOST, RUNS], None),
        ("no_spread_left", 3, [WON, LOST, LOST, RUNS], "the first 3 have ended"),
        ("no_spread_left", 3, [FAILED, FAILED, FAILED, WAITS], "only 1 of 3 rewards are still possible"),
        ("no_spread_left", 3, [FAILED, FAILED, WON, RUNS], None),
        ("no_spread_left", 1, [FAILED, RUNS], None),
        ("token_budget=1000", 3, [WON, LOST, SPENT], "1100 of 1000 tokens are spent"),
        ("token_budget=1000", 3, [WON, SPENT, RUNS], None),  # one rollout is not a group
        ("token_budget=1200", 3, [WON, LOST, SPENT], None),
        ("token_budget=9999", 2, [WON, LOST, SPENT], "the first 2 have ended"),
    ],
)
def test_group_policies(name: str, group_size: int, rollouts: Sequence[PolicyRollout], reason: str | None) -> None:
    policy = get_group_policy(name)
    assert policy(group_size, rollouts) == reason
    assert policy(group_size, list(reversed(rollouts))) == reason


def test_finds_policies_by_name() -> None:
    assert set(GROUP_POLICIES) < set(NAMES)
    for name in GROUP_POLICIES:
        assert get_group_policy(name) is GROUP_POLICIES[name]
    for bad in ("first", "token_budget=", "token_budget=0", "token_budget=-3", "token_budget=many", ""):
        with pytest.raises(UsageError, match="There is no policy"):
            get_group_policy(bad)


def test_reads_stop_when_from_the_task() -> None:
    assert early_stop_check({}) is None
    assert early_stop_check({"stop_when": {"command": ["false"], "every": 2}}) == EarlyStopCheck(
        command=("false",), every=2.0
    )
    assert early_stop_check({"stop_when": {"command": ["false"]}}) == EarlyStopCheck(command=("false",), every=30.0)
    for bad in (
        "test",
        {"command": "false"},
        {"command": []},
        {"command": ["a", 1]},
        {"command": ["a"], "every": 0},
        {"command": ["a"], "every": True},
        {"command": ["a"], "often": 3},
        {"every": 3},
    ):
        with pytest.raises(BadTaskError, match="stop_when"):
            early_stop_check({"stop_when": bad})


class ScriptedSandbox:
    """A sandbox whose commands return given results."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.asked: list[tuple[str, ...]] = []
        self.killed = asyncio.Event()

    async def exec(self, argv: Sequence[str], *, timeout: float | None = None) -> Any:
        self.asked.append(tuple(argv))
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def kill_all(self) -> None:
        self.killed.set()


@dataclass(frozen=True)
class ScriptedResult:
    exit_code: int
    timed_out: bool = False


async def test_stops_the_agent_when_the_check_says_so() -> None:
    sandbox = ScriptedSandbox(ScriptedResult(1), ScriptedResult(0, timed_out=True), ScriptedResult(0))
    async with stop_early(sandbox, EarlyStopCheck(command=("look",), every=0.01)) as early:
        assert early.reason is None
        await asyncio.wait_for(sandbox.killed.wait(), 60)
    assert early.reason is not None
    assert sandbox.asked == [("look",)] * 3


@pytest.mark.parametrize("error", [SandboxError("gone"), OSError("its commands do not end")])
async def test_runs_on_without_a_check_or_with_a_failing_one(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = ScriptedSandbox(error)
    async with stop_early(sandbox, None) as early:
        await asyncio.sleep(0.05)
    assert (early.reason, sandbox.asked) == (None, [])
    async with stop_early(sandbox, EarlyStopCheck(command=("look",), every=0.01)) as early:
        async with asyncio.timeout(60):
            while not sandbox.asked:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # it does not look again
    assert (early.reason, sandbox.asked, sandbox.killed.is_set()) == (None, [("look",)], False)
    assert str(error) in caplog.text
