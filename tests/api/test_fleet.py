"""Pausing, resuming and draining all servers of a database: two servers, each with rollout workers."""

from __future__ import annotations

import asyncio

import pytest

from polar_proxy.store.service.queue import FleetRow
from tests.api.conftest import ServeApi, job_request
from tests.api.test_jobs import until_calls, until_ended

pytestmark = pytest.mark.slow


async def test_one_server_pauses_both(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as one, serve_api(work=True) as other:
        paused = await one.post("/service/pause", {"scope": "all", "seconds": 600})
        assert (paused["state"], paused["paused_until"]) == ("paused", None)
        assert paused["fleet"]["state"] == "paused"
        assert paused["fleet"]["paused_until"] is not None
        assert (await other.get("/service"))["state"] == "paused"
        job = await other.post("/jobs", job_request(), status=201)
        await asyncio.sleep(0.5)
        assert (await one.get(f"/jobs/{job['job_id']}"))["rollouts"] == {"queued": 1}
        # A server cannot end this pause for itself alone.
        assert (await other.post("/service/resume"))["state"] == "paused"
        resumed = await other.post("/service/resume", {"scope": "all"})
        assert (resumed["state"], resumed["fleet"]["state"]) == ("working", "working")
        await until_ended(one, job["job_id"])


async def test_a_timeout_leaves_nothing_paused(serve_api: ServeApi) -> None:
    """The rollout runs on the other server, not on the one that receives the request."""
    async with serve_api() as head, serve_api(work=True) as node:
        job = await node.post("/jobs", job_request("SleepyAgent"), status=201)
        await until_calls(node, 1)
        refused = await head.post("/service/pause", {"scope": "all", "wait_idle": 0.3}, status=409)
        assert (refused["error"]["code"], refused["error"]["detail"]) == ("pause_timed_out", {"in_flight": 1})
        refused = await head.post("/service/drain", {"scope": "all", "timeout": 0.3}, status=409)
        assert refused["error"]["code"] == "drain_timed_out"
        assert len(refused["error"]["detail"]["left"]) == 1
        assert await head.store.fleet.get() == FleetRow(None, None)
        state = await head.get("/service")
        assert (state["state"], state["fleet"]) == (None, {"state": "working", "paused_until": None, "in_flight": 1})
        await node.post(f"/jobs/{job['job_id']}/cancel")
        drained = await head.post("/service/drain", {"scope": "all", "timeout": 60})
        assert drained["fleet"] == {"state": "paused", "paused_until": None, "in_flight": 0}


async def test_an_earlier_or_foreign_pause_is_not_undone(serve_api: ServeApi) -> None:
    async with serve_api() as head, serve_api(work=True) as node:
        job = await node.post("/jobs", job_request("SleepyAgent"), status=201)
        await until_calls(node, 1)
        await head.post("/service/pause", {"scope": "all"})
        before = await head.store.fleet.get()
        await head.post("/service/pause", {"scope": "all", "wait_idle": 0, "seconds": 1000}, status=409)
        assert await head.store.fleet.get() == before
        waiting = asyncio.create_task(head.post("/service/drain", {"scope": "all", "timeout": 1}, status=409))
        await asyncio.sleep(0.3)
        held = await head.store.fleet.get()
        assert held.paused_until is not None  # the pause would end even if the server were killed now
        await node.post("/service/resume", {"scope": "all"})
        await waiting
        assert await head.store.fleet.get() == FleetRow(None, None)
        await node.post(f"/jobs/{job['job_id']}/cancel")
