"""Pausing, resuming and draining jobs and one server."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.api.conftest import ServeApi, job_request
from tests.api.test_jobs import until_calls, until_ended

pytestmark = pytest.mark.slow


async def test_a_job_is_paused_and_resumed(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        await running.post("/service/pause")
        job = await running.post("/jobs", job_request(), status=201)
        paused = (await running.trainer.post(f"/jobs/{job['job_id']}/pause", json={"wait_idle": 5})).json()
        assert (paused["status"], paused["paused_until"]) == ("paused", None)
        await running.post("/service/resume")
        await asyncio.sleep(0.5)
        assert (await running.get(f"/jobs/{job['job_id']}"))["rollouts"] == {"queued": 1}
        assert (await running.post(f"/jobs/{job['job_id']}/resume"))["status"] == "open"
        await until_ended(running, job["job_id"])
        refused = await running.post(f"/jobs/{job['job_id']}/pause", status=409)
        assert refused["error"]["code"] == "conflict"


async def test_a_pause_ends_automatically(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        job = await running.post("/jobs", job_request(), status=201)
        before = time.time()
        paused = await running.post(f"/jobs/{job['job_id']}/pause", {"seconds": 600})
        assert paused["status"] == "paused"
        assert before + 600 <= paused["paused_until"] <= time.time() + 600
        await running.store.jobs.set_status(job["job_id"], "paused", paused_until=time.time())
        async with asyncio.timeout(60):
            while (await running.get(f"/jobs/{job['job_id']}"))["status"] != "open":
                await asyncio.sleep(0.1)


async def test_a_pause_that_times_out_leaves_nothing_paused(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        job = await running.post("/jobs", job_request("SleepyAgent"), status=201)
        await until_calls(running, 1)
        refused = await running.post(f"/jobs/{job['job_id']}/pause", {"wait_idle": 0.3}, status=409)
        assert refused["error"]["code"] == "pause_timed_out"
        assert refused["error"]["detail"] == {"in_flight": 1}
        after = await running.get(f"/jobs/{job['job_id']}")
        assert (after["status"], after["paused_until"], after["rollouts"]) == ("open", None, {"running": 1})

        refused = await running.post("/service/pause", {"wait_idle": 0.3}, status=409)
        assert refused["error"]["code"] == "pause_timed_out"
        refused = await running.post("/service/drain", {"timeout": 0.3}, status=409)
        assert refused["error"]["code"] == "drain_timed_out"
        assert len(refused["error"]["detail"]["left"]) == 1
        state = await running.get("/service")
        assert (state["state"], state["in_flight"], state["paused_until"]) == ("working", 1, None)
        other = await running.post("/jobs", job_request(), status=201)
        assert (await until_ended(running, other["job_id"]))["rollouts"] == {"done": 1}
        await running.post(f"/jobs/{job['job_id']}/cancel")


async def test_an_earlier_pause_stays_after_a_timeout(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        job = await running.post("/jobs", job_request("SleepyAgent"), status=201)
        await until_calls(running, 1)
        await running.post(f"/jobs/{job['job_id']}/pause")
        await running.post(f"/jobs/{job['job_id']}/pause", {"wait_idle": 0, "seconds": 1000}, status=409)
        after = await running.get(f"/jobs/{job['job_id']}")
        assert (after["status"], after["paused_until"]) == ("paused", None)
        await running.post("/service/pause")
        await running.post("/service/pause", {"wait_idle": 0}, status=409)
        assert (await running.get("/service"))["state"] == "paused"
        await running.post(f"/jobs/{job['job_id']}/cancel")


async def test_a_drained_server_is_resumed(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        job = await running.post("/jobs", job_request(), status=201)
        await until_calls(running, 1)
        state = await running.post("/service/drain", {"timeout": 200})
        assert (state["state"], state["in_flight"]) == ("paused", 0)
        assert (await running.get(f"/jobs/{job['job_id']}"))["status"] == "done"
        later = await running.post("/jobs", job_request(), status=201)
        await asyncio.sleep(0.5)
        assert (await running.get(f"/jobs/{later['job_id']}"))["rollouts"] == {"queued": 1}
        assert (await running.post("/service/resume"))["state"] == "working"
        await until_ended(running, later["job_id"])


async def test_service_state_and_metrics(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        job = await running.post("/jobs", job_request(for_training=True), status=201)
        await until_ended(running, job["job_id"])
        state = await running.get("/service")
        assert state["engine"]["healthy"] is True
        assert state["worker"] == running.service.worker.name  # type: ignore[union-attr]
        assert {name: stage["entered"] for name, stage in state["stages"].items()} == dict.fromkeys(
            ("preparing", "running", "scoring"), 1
        )
        assert state["pool"]["hits"] + state["pool"]["misses"] >= 1
        assert state["feed"] == {"waiting": 1}
        metrics = (await running.admin.get(f"{running.gateway.url}/metrics")).text
        assert 'polar_stage_entered_total{stage="running"} 1.0' in metrics
        assert "polar_rollouts_in_flight 0.0" in metrics
    async with serve_api() as alone:
        state = await alone.get("/service")
        assert (state["state"], state["stages"], state["in_flight"]) == (None, None, None)
        for path in ("/service/pause", "/service/resume", "/service/drain"):
            assert (await alone.post(path, status=503))["error"]["code"] == "unavailable"
