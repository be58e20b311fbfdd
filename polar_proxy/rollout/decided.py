"""When a group needs no more rollouts: named policies, pure functions of what has ended so far.

Each takes the group and its rollouts and gives the reason why those still under way may be cancelled, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from polar_proxy.store import FINAL_STATUSES


class Ended(Protocol):
    """What a policy sees of a rollout."""

    @property
    def status(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def incomplete(self) -> bool: ...


Policy = Callable[[int, Sequence[Ended]], str | None]
"""(how many rollouts the group wants, its rollouts) -> why the rest may end, or None."""


def wait_for_all(wanted: int, rollouts: Sequence[Ended]) -> str | None:
    """Every rollout that was started is waited for."""
    return None


def first_n(wanted: int, rollouts: Sequence[Ended]) -> str | None:
    """The first `wanted` that come to an end with a reward make the group; the slow rest is cancelled.

    Over-provisioning as in APRIL (arXiv:2509.18521): n + k are started so that the slowest k hold nobody up."""
    count = len(_useful(rollouts))
    return f"the first {wanted} have ended" if count >= wanted else None


def no_spread_left(wanted: int, rollouts: Sequence[Ended]) -> str | None:
    """As `first_n`; and a group that can no longer be filled, because too many failed, is not waited for."""
    if (enough := first_n(wanted, rollouts)) is not None:
        return enough
    possible = sum(rollout.status not in FINAL_STATUSES for rollout in rollouts) + len(_useful(rollouts))
    return f"only {possible} of {wanted} can still be had" if possible < min(wanted, 2) else None


POLICIES: Mapping[str, Policy] = {policy.__name__: policy for policy in (wait_for_all, first_n, no_spread_left)}


def _useful(rollouts: Sequence[Ended]) -> list[Ended]:
    """Those that count: they came to an end of their own, with everything recorded and a reward."""
    return [
        rollout
        for rollout in rollouts
        if rollout.status in ("done", "timed_out") and rollout.reward is not None and not rollout.incomplete
    ]
