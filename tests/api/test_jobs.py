"""Jobs over HTTP: submission, results, idempotency keys, cancellation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_proxy.rollouts import attempt
from tests.api.conftest import RunningServer, ServeApi, job_request

pytestmark = pytest.mark.slow


async def until_ended(running: RunningServer, job_id: str, seconds: float = 150) -> Any:
    async with asyncio.timeout(seconds):
        while True:
            job = await running.get(f"/jobs/{job_id}")
            if job["ended_at"] is not None:
                return job
            await asyncio.sleep(0.1)


async def until_calls(running: RunningServer, count: int) -> None:
    async with asyncio.timeout(120):
        while sum(row.calls for row in await running.store.sessions.recent()) < count:
            await asyncio.sleep(0.05)


async def test_a_job_from_submission_to_its_rows(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        request_body = job_request(samples=2, for_training=True, label="try", priority=2)
        job = await running.post("/jobs", request_body, status=201, **{"idempotency-key": "k"})
        assert (job["status"], job["groups"], job["new"], job["refused"]) == ("open", 1, True, [])
        ended = await until_ended(running, job["job_id"])
        assert (ended["status"], ended["rollouts"], ended["label"]) == ("done", {"done": 2}, "try")
        (group,) = ended["group_list"]
        assert (group["status"], group["delivery"], group["rollout_count"]) == ("finished", "waiting", 2)

        rollouts = (await running.get(f"/jobs/{job['job_id']}/rollouts"))["rollouts"]
        assert [(row["group_index"], row["status"], row["reward"]) for row in rollouts] == [
            *((0, "done", 1.0), (1, "done", 1.0)),
        ]
        assert (await running.get(f"/groups/{group['group_id']}"))["rollouts"] == rollouts
        one = await running.get(f"/rollouts/{rollouts[0]['rollout_id']}")
        assert [stage["stage"] for stage in one["stages"]] == ["preparing", "ready", "running", "scoring"]
        assert [reward["value"] for reward in one["rewards"]] == [1.0]
        found = await running.get("/rollouts", where=f"job_id={job['job_id']}, masked=false, reward>=1", limit=1)
        assert [row["rollout_id"] for row in found["rollouts"]] == [rollouts[1]["rollout_id"]]

        answer = await running.trainer.get(f"/groups/{group['group_id']}/trajectories")
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        rows = [orjson.loads(line) for line in answer.text.splitlines()]
        assert list(dict.fromkeys(row["rollout_id"] for row in rows)) == [row["rollout_id"] for row in rollouts]
        assert sum(sum(row["loss_mask"]) for row in rows) == sum(row["trained_tokens"] for row in rollouts)
        assert {(row["group_id"], row["reward"], row["masked"], row["grade"]) for row in rows} == {
            (group["group_id"], 1.0, False, rows[0]["grade"])
        }
        assert rows[0]["certificate"]
        alone = await running.trainer.get(f"/rollouts/{rollouts[1]['rollout_id']}/trajectory")
        assert [orjson.loads(line) for line in alone.text.splitlines()] == [
            row for row in rows if row["rollout_id"] == rollouts[1]["rollout_id"]
        ]

        again = await running.post("/jobs", request_body, status=200, **{"idempotency-key": "k"})
        assert (again["job_id"], again["new"], again["status"]) == (job["job_id"], False, "done")
        other = await running.post("/jobs", {**request_body, "samples": 3}, status=400, **{"idempotency-key": "k"})
        assert "was used for another job" in other["error"]["message"]
        listed = await running.get("/jobs", state="done,cancelled")
        assert [row["job_id"] for row in listed["jobs"]] == [job["job_id"]]
        assert listed["feed"] == {"waiting": 1}


async def test_concurrent_submissions_under_one_key_make_one_job(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        answers = await asyncio.gather(
            *(running.admin.post("/jobs", json=job_request(), headers={"idempotency-key": "same"}) for _ in range(8))
        )
        assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
        assert len({answer.json()["job_id"] for answer in answers}) == 1
        assert len((await running.get("/jobs"))["jobs"]) == 1


async def test_bad_tasks_are_refused_by_name_and_the_good_ones_run(serve_api: ServeApi, tmp_path: Path) -> None:
    good = {"task_id": "good", "instruction": "do it", "evaluator": {"kind": "command", "argv": ["true"]}}
    bad = {"task_id": "bad", "instruction": "do it", "evaluator": {"kind": "command"}}
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b"\n".join(orjson.dumps(row) for row in (bad, good)))
    request_body = {**job_request(), "task": None, "seed": None}
    async with serve_api(folders=[tmp_path]) as running:
        for request, where in (({"task_specs": [bad, good]}, "task_specs[0]"), ({"task": str(file)}, "tasks.jsonl:1")):
            job = await running.post("/jobs", {**request_body, **request}, status=201)
            assert job["groups"] == 1
            (refusal,) = job["refused"]
            assert (refusal["where"], refusal["name"]) == (where, "bad")
            assert "argv" in refusal["reason"]
        refused = await running.post("/jobs", {**request_body, "task_specs": [bad]}, status=400)
        assert refused["error"]["detail"][0]["where"] == "task_specs[0]"
        assert len((await running.get("/jobs"))["jobs"]) == 2


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"task": "no-such-family"}, 400, "no task family 'no-such-family'"),
        ({"task": None}, 422, "give one of task, task_specs and repeat_of"),
        ({"instances": 0}, 422, "instances"),
        ({"sampels": 2}, 422, "sampels"),
        ({"samples": 2, "group_size": 3}, 400, "needs at least 3 samples"),
        ({"group_policy": "luck"}, 400, "luck"),
        ({"harness": "no-such"}, 400, "no-such"),
        ({"temperature": -1}, 422, "temperature"),
        ({"callback_url": "file:///etc/passwd"}, 400, "callback_url"),
        ({"callback_url": "https://me:secret@host/x"}, 400, "password"),
    ],
)
async def test_rejects_invalid_requests(serve_api: ServeApi, change: dict[str, Any], status: int, message: str) -> None:
    async with serve_api() as running:
        error = (await running.post("/jobs", {**job_request(), **change}, status=status))["error"]
        assert message in error["message"]
        assert "secret" not in str(error)
        assert (await running.get("/jobs"))["jobs"] == []


async def test_unknown_ids_are_not_found(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        for path in (
            *("/jobs/job_none", "/jobs/job_none/rollouts", "/groups/group_none", "/groups/group_none/trajectories"),
            *("/rollouts/roll_none", "/rollouts/roll_none/trajectory"),
        ):
            assert (await running.get(path, status=404))["error"]["code"] == "not_found"
        for path in ("/jobs/job_none", "/groups/group_none", "/rollouts/roll_none"):
            await running.post(f"{path}/cancel", status=404)
        await running.post("/jobs/job_none/pause", status=404)
        await running.post("/jobs/job_none/resume", status=404)
        assert (await running.get("/rollouts", where="colour=red", status=400))["error"]["code"] == "bad_request"


@pytest.mark.parametrize("what", ["job", "group", "rollout"])
async def test_cancels_while_the_agent_runs(serve_api: ServeApi, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_IDLE_SECONDS", 600.0)  # cancellation must not wait for this
    async with serve_api(work=True) as running:
        job = await running.post("/jobs", job_request("SleepyAgent"), status=201)
        await until_calls(running, 1)
        detail = await running.get(f"/jobs/{job['job_id']}")
        (row,) = (await running.get(f"/jobs/{job['job_id']}/rollouts"))["rollouts"]
        target = {
            "job": f"/jobs/{job['job_id']}",
            "group": f"/groups/{detail['group_list'][0]['group_id']}",
            "rollout": f"/rollouts/{row['rollout_id']}",
        }[what]
        cancelled = await asyncio.wait_for(running.post(f"{target}/cancel"), 120)
        assert cancelled["in_flight"] == [row["rollout_id"]]
        ended = await until_ended(running, job["job_id"])
        assert ended["rollouts"] == {"cancelled": 1}
        assert (await running.post(f"{target}/cancel"))["in_flight"] in ([], [row["rollout_id"]])
        assert (await running.get(f"/rollouts/{row['rollout_id']}"))["stages"][-1]["outcome"] == "cancelled"


async def test_cancels_queued_rollouts(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        given = {"samples": 3, "group_size": 2, "group_policy": "first_n", "overflow": "keep", "max_staleness": 4}
        job = await running.post("/jobs", job_request(for_training=True, **given), status=201)
        row = await running.store.jobs.get(job["job_id"])
        assert row is not None
        assert row.spec.items() >= given.items()
        first, *_ = (await running.get(f"/jobs/{job['job_id']}/rollouts"))["rollouts"]
        assert (await running.post(f"/rollouts/{first['rollout_id']}/cancel"))["in_flight"] == []
        assert (await running.get(f"/jobs/{job['job_id']}"))["rollouts"] == {"cancelled": 1, "queued": 2}
        assert (await running.post(f"/jobs/{job['job_id']}/cancel"))["in_flight"] == []
        ended = await running.get(f"/jobs/{job['job_id']}")
        assert (ended["status"], ended["rollouts"]) == ("cancelled", {"cancelled": 3})
