"""When a group needs no more rollouts: named policies, pure functions of what has ended so far.

Each takes how many rollouts the group wants and all of them, and gives the reason why those still under way may be
given up, or None. It is asked whenever one of them has ended. What becomes of those (`cancel`, `keep`) is the group's
`surplus`, no matter of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from polar_proxy.errors import UsageError
from polar_proxy.store import FINAL_STATUSES


class RolloutProgress(Protocol):
    """What a policy sees of a rollout."""

    @property
    def status(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def incomplete(self) -> bool: ...
    @property
    def completion_tokens(self) -> int: ...


GroupPolicy = Callable[[int, Sequence[RolloutProgress]], str | None]
"""(how many rollouts the group wants, its rollouts) -> why the rest may end, or None."""


def wait_for_all(wanted: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """Every rollout that was started is waited for."""
    return None


def first_n(wanted: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """The first `wanted` that come to an end with a reward make the group; the slow rest is given up.

    Over-provisioning as in APRIL (arXiv:2509.18521): n + k are started so that the slowest k hold nobody up."""
    count = len(_useful(rollouts))
    return f"the first {wanted} have ended" if count >= wanted else None


def first_n_with_spread(wanted: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """As `first_n`, but as long as their rewards are all equal more are waited for.

    A group of equal rewards has no advantage in it, and teaches nothing (DAPO, arXiv:2503.14476, dynamic sampling)."""
    rewards = {rollout.reward for rollout in _useful(rollouts)}
    return first_n(wanted, rollouts) if len(rewards) > 1 else None


def no_spread_left(wanted: int, rollouts: Sequence[RolloutProgress]) -> str | None:
    """As `first_n`; and a group that can no longer be filled, because too many failed, is not waited for."""
    if (enough := first_n(wanted, rollouts)) is not None:
        return enough
    possible = sum(rollout.status not in FINAL_STATUSES for rollout in rollouts) + len(_useful(rollouts))
    return f"only {possible} of {wanted} can still be had" if possible < min(wanted, 2) else None


def token_budget(tokens: int) -> GroupPolicy:
    """As `first_n`; and when all rollouts together have sampled so many tokens, those that have ended make the group,
    if they are two at least. Named `token_budget=N`."""

    def policy(wanted: int, rollouts: Sequence[RolloutProgress]) -> str | None:
        if (enough := first_n(wanted, rollouts)) is not None:
            return enough
        spent = sum(rollout.completion_tokens for rollout in rollouts)
        if spent < tokens or len(_useful(rollouts)) < 2:
            return None
        return f"{spent} of {tokens} tokens are spent"

    return policy


GROUP_POLICIES: Mapping[str, GroupPolicy] = {
    policy.__name__: policy for policy in (wait_for_all, first_n, first_n_with_spread, no_spread_left)
}
_BUDGET = "token_budget="
NAMES = (*sorted(GROUP_POLICIES), f"{_BUDGET}N")


def get_group_policy(name: str) -> GroupPolicy:
    """The policy of this name. Raises UsageError."""
    if name in GROUP_POLICIES:
        return GROUP_POLICIES[name]
    number = name.removeprefix(_BUDGET)
    if name.startswith(_BUDGET) and number.isdecimal() and int(number) > 0:
        return token_budget(int(number))
    raise UsageError(f"There is no policy {name!r}: {', '.join(NAMES)}.")


def _useful(rollouts: Sequence[RolloutProgress]) -> list[RolloutProgress]:
    """Those that count: they came to an end of their own, with everything recorded and a reward."""
    return [
        rollout
        for rollout in rollouts
        if rollout.status in ("done", "timed_out") and rollout.reward is not None and not rollout.incomplete
    ]
