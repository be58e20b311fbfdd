"""Groups from a real server's feed, through TRL's rollout function."""

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

pytestmark = pytest.mark.slow

TRAINER = SimpleNamespace(accelerator=SimpleNamespace(num_processes=1), num_generations=2, temperature=1.0)


@pytest.fixture
def server(polar_home: Path) -> Iterator[PolarServer]:
    with polar_serve(polar_home) as running:
        yield running


def test_groups_are_leased_and_acknowledged_after_the_checkpoint(server: PolarServer) -> None:
    with Client(server.url, server.key) as polar:
        job = polar.submit(JobRequest(task="swe-task", instances=2, samples=2, for_training=True))
        polar.wait(job.job_id)
        feed = FeedGroups(polar, consumer="trl", patience=1.0)
        # The policy is scripted, so each call of the agent is a separate sequence.
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
