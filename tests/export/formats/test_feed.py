"""Groups of a real server's feed as a rollout function gets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from polar_proxy.api_models import JobRequest
from polar_proxy.client import Client
from polar_proxy.errors import UsageError
from polar_proxy.export.formats.feed import FeedGroups
from polar_proxy.export.formats.trl import RecordedRollouts
from tests.client.server import PolarServer, polar_serve

TRAINER = SimpleNamespace(accelerator=SimpleNamespace(num_processes=1), num_generations=2)


@pytest.fixture
def server(polar_home: Path) -> Iterator[PolarServer]:
    with polar_serve(polar_home) as running:
        yield running


def test_leased_handed_out_and_acknowledged_when_saved(server: PolarServer) -> None:
    with Client(server.url, server.key) as polar:
        job = polar.submit(JobRequest(task="swe-task", instances=2, samples=2, for_training=True))
        polar.wait(job.job_id)
        feed = FeedGroups(polar, consumer="trl", patience=1.0)
        # The fake policy is scripted; each call of its agent is a sequence of its own.
        rollouts = RecordedRollouts(feed, several="longest")
        first = rollouts(["any"] * 2, TRAINER)
        assert polar.feed().depth["leased"] == 1
        assert len(first["trace_id"]) == len(set(first["trace_id"])) == 2
        assert all(any(mask) for mask in first["env_mask"])
        second = rollouts(["any"] * 2, TRAINER)
        assert not set(first["trace_id"]) & set(second["trace_id"])
        feed.when_saved().on_save(None, None, None)
        assert polar.feed().depth == {"delivered": 2}
        assert feed.acknowledge() == 0
        with pytest.raises(UsageError, match="No group came"):
            rollouts(["any"] * 2, TRAINER)
