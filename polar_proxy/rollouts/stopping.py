"""When rollouts end before their time: group policies, a task's own check, and budgets.

**Group policies** are pure functions that decide when a group needs no more rollouts. A policy gets the group size and
all rollouts of the group, each time that one of them has ended. It returns the reason why the group is complete, or
None. `JobSpec.overflow` decides what then happens to the rollouts that still run.

**Early stop.** A task's metadata may hold a check that shows when its agent can no longer succeed:

    "stop_when": {"command": ["sh", "-c", "test ! -d src"], "every": 30}

The command runs in the agent's own sandbox every `every` seconds while the agent works. When its exit status is 0, the
agent is stopped, and its work is scored as usual. The check saves time and never decides the reward, so an agent gains
nothing by deceiving it. The command must not contain a secret, because the agent can see it run.

**Budgets.** When the budget of a session is spent, the gateway refuses further calls or answers them with a text that
asks the agent to finish (`sessions/budget.py`). Most agents then end by themselves. An agent that still runs
`GRACE_SECONDS` later is stopped. If the budget `max_idle_seconds` is spent, the idle agent is stopped at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar_proxy.errors import BadTaskError, StoreError, UsageError, first_problem
from polar_proxy.gateway import Gateway
from polar_proxy.store import FINAL_STATUSES, RolloutRow
from sandboxes.base import Sandbox, SandboxError

log = logging.getLogger(__name__)

STOPPED_EARLY = "lost"
"""The recorded cause of a rollout whose agent was stopped early."""
OVER_BUDGET = "budget"
"""The recorded cause of a rollout whose session spent its budget."""
GRACE_SECONDS = 60.0
"""How long an agent may run after its first call that was over budget."""
_BUDGET_POLL_SECONDS = 1.0
_COMMAND_SECONDS = 30.0
"""Time limit of each run of the task's `stop_when` command. A run that takes longer does not stop the agent."""


# ---------------------------------------------------------------- group policies


GroupPolicy = Callable[[int, Sequence[RolloutRow]], str | None]
"""A function of the group size and the group's rollouts. It returns why the group is complete, or None."""


def wait_for_all(group_size: int, rollouts: Sequence[RolloutRow]) -> str | None:
    """Wait for every rollout that was started."""
    return None


def first_n(group_size: int, rollouts: Sequence[RolloutRow]) -> str | None:
    """Complete the group with the first `group_size` rollouts that end with a reward.

    Over-provisioning as in APRIL (arXiv:2509.18521): n + k rollouts are started, so that the group need not wait for
    the slowest k."""
    count = len(_usable(rollouts))
    return f"the first {group_size} have ended" if count >= group_size else None


def first_n_with_spread(group_size: int, rollouts: Sequence[RolloutRow]) -> str | None:
    """Like `first_n`, but wait for more rollouts while all rewards are equal.

    A group of equal rewards has zero advantages and no training signal (DAPO, arXiv:2503.14476, dynamic sampling)."""
    rewards = {rollout.reward for rollout in _usable(rollouts)}
    return first_n(group_size, rollouts) if len(rewards) > 1 else None


def no_spread_left(group_size: int, rollouts: Sequence[RolloutRow]) -> str | None:
    """Like `first_n`, and also complete the group if at most one of its rollouts has a reward or can still get one.

    Rewards can then no longer be compared. With `group_size` 1 there is nothing to compare, so the group is completed
    only if no rollout has a reward or can still get one."""
    if (complete := first_n(group_size, rollouts)) is not None:
        return complete
    possible = sum(rollout.status not in FINAL_STATUSES for rollout in rollouts) + len(_usable(rollouts))
    return f"only {possible} of {group_size} rewards are still possible" if possible < min(group_size, 2) else None


def token_budget(tokens: int) -> GroupPolicy:
    """Like `first_n`, and also complete the group once its rollouts have sampled this many tokens in total and at least
    two have ended with a reward. The name of the policy is `token_budget=N`."""

    def policy(group_size: int, rollouts: Sequence[RolloutRow]) -> str | None:
        if (complete := first_n(group_size, rollouts)) is not None:
            return complete
        spent = sum(rollout.completion_tokens for rollout in rollouts)
        if spent < tokens or len(_usable(rollouts)) < 2:
            return None
        return f"{spent} of {tokens} tokens are spent"

    return policy


GROUP_POLICIES: Mapping[str, GroupPolicy] = {
    policy.__name__: policy for policy in (wait_for_all, first_n, first_n_with_spread, no_spread_left)
}
_BUDGET = "token_budget="
NAMES = (*sorted(GROUP_POLICIES), f"{_BUDGET}N")


def get_group_policy(name: str) -> GroupPolicy:
    """Return the policy of this name. Raises UsageError if there is none."""
    if name in GROUP_POLICIES:
        return GROUP_POLICIES[name]
    number = name.removeprefix(_BUDGET)
    if name.startswith(_BUDGET) and number.isdecimal() and int(number) > 0:
        return token_budget(int(number))
    raise UsageError(f"There is no policy {name!r}: choose one of {', '.join(NAMES)}.")


def _usable(rollouts: Sequence[RolloutRow]) -> list[RolloutRow]:
    """Return the rollouts that have ended as `done` or `timed_out`, have a reward, and have all their calls
    recorded."""
    return [
        rollout
        for rollout in rollouts
        if rollout.status in ("done", "timed_out") and rollout.reward is not None and not rollout.incomplete
    ]


# ---------------------------------------------------------------- early stop


class EarlyStopCheck(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    command: tuple[str, ...] = Field(min_length=1)
    every: float = Field(30.0, gt=0, strict=True)
    """Seconds between two runs of the command."""


@dataclass(slots=True)
class EarlyStop:
    """`reason` says why the agent was stopped; None if it was not."""

    reason: str | None = None


def early_stop_check(metadata: Mapping[str, Any]) -> EarlyStopCheck | None:
    """Return the check in a task's metadata, or None if there is none. Raises BadTaskError."""
    given = metadata.get("stop_when")
    try:
        return None if given is None else EarlyStopCheck.model_validate(given)
    except ValidationError as error:
        raise BadTaskError(first_problem(error, "stop_when")) from None


@contextlib.asynccontextmanager
async def stop_early(sandbox: Sandbox, check: EarlyStopCheck | None) -> AsyncIterator[EarlyStop]:
    """While the block runs an agent, run `check` repeatedly; once it succeeds, kill everything in the sandbox.

    Yields the `EarlyStop`, which has a reason as soon as the check has succeeded. Without a check, do nothing.
    """
    early = EarlyStop()
    async with contextlib.nullcontext() if check is None else _in_background(_run_check(sandbox, check, early)):
        yield early


async def _run_check(sandbox: Sandbox, check: EarlyStopCheck, early: EarlyStop) -> None:
    try:
        while early.reason is None:
            await asyncio.sleep(check.every)
            result = await sandbox.exec(check.command, timeout=_COMMAND_SECONDS)
            if result.exit_code == 0 and not result.timed_out:
                early.reason = "the task's stop_when command reported that the agent can no longer succeed"
        await sandbox.kill_all()
    except (SandboxError, OSError) as error:  # if the sandbox is gone, the agent's own command fails as well
        log.warning("the stop_when command can no longer be run: %s", error)


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` until it ends or the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---------------------------------------------------------------- budgets


@contextlib.asynccontextmanager
async def stop_over_budget(
    sandbox: Sandbox, gateway: Gateway, session_id: str, *, limited: bool
) -> AsyncIterator[None]:
    """While the block runs an agent, kill everything in the sandbox if the agent goes on after its budget is spent.

    `limited`: whether the session has a budget.
    """
    async with _in_background(_watch_budget(sandbox, gateway, session_id)) if limited else contextlib.nullcontext():
        yield


async def _watch_budget(sandbox: Sandbox, gateway: Gateway, session_id: str) -> None:
    started_at = time.time()
    try:
        limit = None
        while limit is None:
            await asyncio.sleep(_BUDGET_POLL_SECONDS)
            limit = await _spent(gateway, session_id, started_at)
        if limit != "max_idle_seconds":  # an idle agent waits for no answer that could end it
            await asyncio.sleep(GRACE_SECONDS)
        await sandbox.kill_all()
    except (SandboxError, OSError) as error:
        log.warning("an agent over its budget cannot be stopped: %s", error)


async def _spent(gateway: Gateway, session_id: str, started_at: float) -> str | None:
    try:
        return await gateway.budget_spent(session_id, idle_since=started_at)
    except StoreError:  # the gateway reports it; the next poll asks again
        return None
