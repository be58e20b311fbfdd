"""Groups straight from a server's trainer feed, for a trainer that pulls: TRL's `rollout_func`, a loop of your own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polar_proxy.api_models import LeaseRequest
from polar_proxy.client import Client
from polar_proxy.errors import UsageError
from polar_proxy.types import Json


class FeedGroups:
    """Leases one group after the other and yields its rows. Nobody else gets it meanwhile.

    What was handed out is acknowledged by `acknowledge`, which belongs behind the checkpoint that holds what it taught:
    whatever was not comes again when its lease ends. `when_saved` does so for trainers of Transformers.
    """

    def __init__(self, polar: Client, *, consumer: str, seconds: float = 600.0, patience: float = 3600.0) -> None:
        """`seconds`: of a lease, longer than a step and its checkpoint. `patience`: how long no group may come."""
        self._polar, self._consumer = polar, consumer
        self._seconds, self._patience = seconds, patience
        self._open: list[str] = []

    def __iter__(self) -> Iterator[list[Json]]:
        """Raises UsageError where no group came for so long."""
        while True:
            waited = 0.0
            wait = min(60.0, self._patience)
            request = LeaseRequest(consumer=self._consumer, limit=1, seconds=self._seconds, wait=wait)
            while not (leases := self._polar.lease(request).leases):
                if (waited := waited + wait) >= self._patience:
                    raise UsageError(f"No group came from the feed for {waited:g} s: submit tasks with --offered.")
            for lease in leases:
                self._open.append(lease.lease_id)
                yield list(self._polar.group_trajectories(lease.group_id))

    def acknowledge(self) -> int:
        """Everything handed out so far is done with; returns how many groups. Raises LeaseLostError where one took
        longer than its lease: it will come again."""
        done = 0
        while self._open:
            self._polar.acknowledge(self._open.pop(0))
            done += 1
        return done

    def when_saved(self) -> Any:
        """A `TrainerCallback` that acknowledges after each checkpoint (`trainer.add_callback(feed.when_saved())`)."""
        from transformers import TrainerCallback

        feed = self

        class Acknowledge(TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_save(self, *_: Any, **__: Any) -> None:
                feed.acknowledge()

        return Acknowledge()
