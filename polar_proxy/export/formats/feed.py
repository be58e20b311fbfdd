"""Groups from a server's trainer feed, for trainers that request them: TRL's `rollout_func`, or your own loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polar_proxy.api_models import LeaseRequest
from polar_proxy.client import Client
from polar_proxy.errors import UsageError
from polar_proxy.types import Json


class FeedGroups:
    """Leases one group after the other and yields its rows. No other consumer gets a leased group.

    Call `acknowledge` after a checkpoint of the weights that were trained on the groups: a group that is not
    acknowledged is offered again when its lease ends. `when_saved` does this for trainers of Transformers.
    """

    def __init__(self, polar: Client, *, consumer: str, seconds: float = 600.0, patience: float = 3600.0) -> None:
        """`seconds`: how long a lease lasts. This must be enough for a training step and for saving the step's
        checkpoint. `patience`: how many seconds to wait for a group before giving up."""
        self._polar, self._consumer = polar, consumer
        self._seconds, self._patience = seconds, patience
        self._open: list[str] = []

    def __iter__(self) -> Iterator[list[Json]]:
        """Yield the rows of one group after another. Raise UsageError if no group arrives for `patience` seconds."""
        while True:
            waited = 0.0
            wait = min(60.0, self._patience)
            request = LeaseRequest(consumer=self._consumer, limit=1, seconds=self._seconds, wait=wait)
            while not (leases := self._polar.lease(request).leases):
                if (waited := waited + wait) >= self._patience:
                    raise UsageError(f"No group came from the feed for {waited:g} s: submit tasks with --for-training.")
            for lease in leases:
                self._open.append(lease.lease_id)
                yield list(self._polar.group_trajectories(lease.group_id))

    def acknowledge(self) -> int:
        """Mark all groups that were handed out until now as used, and return how many.

        Raise LeaseLostError if a lease has expired already; its group is offered again.
        """
        done = 0
        while self._open:
            self._polar.acknowledge(self._open.pop(0))
            done += 1
        return done

    def when_saved(self) -> Any:
        """Return a `TrainerCallback` that calls `acknowledge` after each checkpoint. Give it to
        `trainer.add_callback`."""
        from transformers import TrainerCallback

        feed = self

        class Acknowledge(TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_save(self, *_: Any, **__: Any) -> None:
                feed.acknowledge()

        return Acknowledge()
