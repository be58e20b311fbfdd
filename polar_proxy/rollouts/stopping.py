"""Group policies: pure functions of a group's rollouts that decide when the group needs no more of them.

A policy gets the group size and all rollouts of the group, each time that one of them has ended. It returns the reason
why the group is complete, or None. `JobSpec.overflow` decides what then happens to the rollouts that still run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from polar_proxy.errors import UsageError
from polar_proxy.store import FINAL_STATUSES


class RolloutProgress(Protocol):
    """The part of a rollout that policies read."""

    @property
    def status(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def incomplete(self) -> bool: ...
    @property
    def completion_tokens(self) -> int: ...


GroupPolicy = Callable[[int, Sequence[RolloutProgress]], str | None]
"""(group size, the group's rollouts) -> why the group is complete, or None."""


def wait_for_all(group_size: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """Wait for every rollout that was started."""
    return None


def first_n(group_size: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """Complete the group with the first `group_size` rollouts that end with a reward.

    Over-provisioning as in APRIL (arXiv:2509.18521): n + k rollouts are started, so that the group need not wait for
    the slowest k."""
    count = len(_usable(rollouts))
    return f"the first {group_size} have ended" if count >= group_size else None


def first_n_with_spread(group_size: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """Like `first_n`, but wait for more rollouts while all rewards are equal.

    A group of equal rewards has zero advantages and no training signal (DAPO, arXiv:2503.14476, dynamic sampling)."""
    rewards = {rollout.reward for rollout in _usable(rollouts)}
    return first_n(group_size, rollouts) if len(rewards) > 1 else None


def no_spread_left(group_size: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """Like `first_n`, and also stop waiting for a group that cannot be filled because too many rollouts failed."""
    if (complete := first_n(group_size, rollouts)) is not None:
        return complete
    possible = sum(rollout.status not in FINAL_STATUSES for rollout in rollouts) + len(_usable(rollouts))
    return f"only {possible} of {group_size} are still possible" if possible < min(group_size, 2) else None


def token_budget(tokens: int) -> GroupPolicy:
    """Like `first_n`, and also complete the group once its rollouts have sampled this many tokens in total, if at least
    two have ended. Its name is `token_budget=N`."""

    def policy(group_size: int, rollouts: Sequence[RolloutProgress]) -> str | None:
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
    """Return the policy of this name. Raises UsageError."""
    if name in GROUP_POLICIES:
        return GROUP_POLICIES[name]
    number = name.removeprefix(_BUDGET)
    if name.startswith(_BUDGET) and number.isdecimal() and int(number) > 0:
        return token_budget(int(number))
    raise UsageError(f"There is no policy {name!r}: choose one of {', '.join(NAMES)}.")


def _usable(rollouts: Sequence[RolloutProgress]) -> list[RolloutProgress]:
    """Return the rollouts that are done or timed out, with a reward and with all calls recorded."""
    return [
        rollout
        for rollout in rollouts
        if rollout.status in ("done", "timed_out") and rollout.reward is not None and not rollout.incomplete
    ]
