"""A client that follows a job does not notice that the server is killed and started again."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from polar_proxy.api_models import Event, JobRequest
from polar_proxy.client import Client
from tests.client.server import polar_serve

pytestmark = pytest.mark.slow


def test_events_continue_after_the_server_is_killed(polar_home: Path) -> None:
    found: list[Event] = []
    running = threading.Event()

    def follow(url: str, key: str, job_id: str) -> None:
        with Client(url, key, tries=30) as polar:
            for event in polar.events(job_id):
                found.append(event)
                if event.data.get("to") == "running":
                    running.set()

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(polar_serve(polar_home))
        with Client(server.url, server.key) as polar:
            agent = "tests.fakes.tiny_agent:HeldAgent"
            slow = polar.submit(JobRequest(task="swe-task", seed=3, harness=agent, timeout=600))
        thread = threading.Thread(target=follow, args=(server.url, server.key, slow.job_id), daemon=True)
        thread.start()
        assert running.wait(120)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        again = stack.enter_context(polar_serve(polar_home, "--port", str(urlsplit(server.url).port)))
        (polar_home / "go").touch()
        thread.join(150)
        assert not thread.is_alive()
        with Client(again.url, again.key) as polar:
            assert polar.job(slow.job_id).status == "done"
            (rollout,) = polar.job_rollouts(slow.job_id).rollouts
    stages = [(event.data.get("to"), event.data.get("cause")) for event in found if event.event == "stage"]
    assert [to for to, _ in stages].count("running") == 2  # the attempt that the kill ended, and the one after it
    assert ("queued", "worker_lost") in stages
    assert stages[-1][0] == rollout.status == "done"
    assert found[-1].event == "end"
    assert len({event.id for event in found}) == len(found) - 1
