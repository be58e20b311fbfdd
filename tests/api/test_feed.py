"""The trainer feed, rewards and sessions over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from polar_proxy.api import training
from polar_proxy.rollout_spec import whole_distribution
from polar_proxy.store import Store
from tests.api.conftest import RunningServer, ServeApi, job_request
from tests.api.test_jobs import until_ended
from tests.store.test_feed import finished

pytestmark = pytest.mark.slow


async def lease(running: RunningServer, **given: Any) -> Any:
    answer = await running.trainer.post("/feed/lease", json={"consumer": "t", **given})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_group_is_leased_to_one_consumer(serve_api: ServeApi, store: Store) -> None:
    """Several consumers lease at once, on two servers of one database."""
    groups = await finished(store, 16)
    async with serve_api() as one, serve_api() as other:

        async def consume(running: RunningServer, name: str) -> list[str]:
            mine: list[str] = []
            while offer := (await lease(running, consumer=name, limit=2))["leases"]:
                for one_lease in offer:
                    answer = await running.trainer.post(f"/feed/leases/{one_lease['lease_id']}/ack")
                    assert answer.json()["outcome"] == "acknowledged"
                    mine.append(one_lease["group_id"])
            return mine

        got = await asyncio.gather(*(consume(server, f"c{n}") for n, server in enumerate((one, other) * 2)))
        assert Counter(group for mine in got for group in mine) == Counter(groups)
        assert (await one.get("/feed"))["depth"] == {"delivered": 16}


async def test_leases_are_returned_extended_and_acknowledged(serve_api: ServeApi, store: Store) -> None:
    first, second = await finished(store, 2, version="4")
    async with serve_api() as running:
        before = time.time()
        (one,) = (await lease(running, seconds=100, policy_version="5"))["leases"]
        assert (one["group_id"], one["staleness"], one["policy_version"], one["consumer"]) == (first, 1, "4", "t")
        assert before + 100 <= one["expires_at"] <= time.time() + 100
        path = f"/feed/leases/{one['lease_id']}"
        extended = await running.post(f"{path}/extend", {"seconds": 1000})
        assert extended["expires_at"] > one["expires_at"] + 800
        assert (await running.post(f"{path}/return"))["outcome"] == "returned"
        assert (await running.post(f"{path}/return"))["outcome"] == "returned"  # idempotent
        for end, body in (("ack", None), ("extend", {"seconds": 1.0})):
            lost = await running.post(f"{path}/{end}", body, status=409)
            assert lost["error"]["code"] == "lease_lost"
        await running.post("/feed/leases/lease_none/ack", status=409)

        (short,) = (await lease(running, seconds=0.2))["leases"]
        assert short["group_id"] == first
        offer = await lease(running, limit=2, wait=120)  # an expired lease can be leased again
        if len(offer["leases"]) == 1:
            offer["leases"] += (await lease(running, limit=2, wait=120))["leases"]
        assert {one["group_id"] for one in offer["leases"]} == {first, second}
        assert (await running.post(f"/feed/leases/{short['lease_id']}/ack", status=409))["error"][
            "code"
        ] == "lease_lost"


async def test_stale_groups_are_dropped_with_a_reason(serve_api: ServeApi, store: Store) -> None:
    (old,) = await finished(store, 1, version="1")
    (young,) = await finished(store, 1, version="5")
    async with serve_api() as running:
        offer = await lease(running, limit=5, policy_version="6", max_staleness=2)
        assert ([one["group_id"] for one in offer["leases"]], offer["dropped"]) == ([young], [old])
        assert await running.get("/feed") == {
            "depth": {"leased": 1, "dropped": 1},
            "dropped_reasons": {"more than 2 policy versions old": 1},
        }
        refused = await running.post(
            "/feed/lease", {"consumer": "t", "policy_version": "a", "max_staleness": 1}, status=400
        )
        assert "a number" in refused["error"]["message"]
        await running.post("/feed/lease", {"consumer": ""}, status=422)
        await running.post("/feed/lease", {"consumer": "t", "seconds": -1}, status=422)


async def test_lease_waits_for_a_group(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        began = time.monotonic()
        assert (await lease(running, wait=0.5))["leases"] == []
        assert time.monotonic() - began >= 0.5
        waiting = asyncio.create_task(lease(running, wait=200))
        job = await running.post("/jobs", job_request(for_training=True), status=201)
        offer = await asyncio.wait_for(waiting, 250)
        (group,) = (await running.get(f"/jobs/{job['job_id']}"))["group_list"]
        assert [one["group_id"] for one in offer["leases"]] == [group["group_id"]]


async def test_a_client_that_disconnects_while_waiting_leases_nothing(
    serve_api: ServeApi, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, given_up = asyncio.Event(), asyncio.Event()

    async def noted(*given: Any) -> bool:
        waits.set()
        found = await wait_for_group(*given)
        given_up.set()
        return found

    wait_for_group = training._wait_for_group
    monkeypatch.setattr(training, "_wait_for_group", noted)
    async with serve_api() as running:
        waiting = asyncio.create_task(lease(running, wait=300))
        await asyncio.wait_for(waits.wait(), 60)
        assert not given_up.is_set()
        waiting.cancel()
        await asyncio.wait_for(given_up.wait(), 60)
        await finished(store, 1)
        assert (await running.get("/feed"))["depth"] == {"waiting": 1}


async def test_rewards_are_added_to_rollouts_calls_and_traces(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        job = await running.post("/jobs", job_request(), status=201)
        await until_ended(running, job["job_id"])
        (row,) = (await running.get(f"/jobs/{job['job_id']}/rollouts"))["rollouts"]
        calls = await running.store.calls.summaries(row["session_id"])
        traces = await running.store.traces.find(rollout_id=row["rollout_id"])
        mine = {"rollout_id": row["rollout_id"], "source": "human:anna"}

        async def give(**given: Any) -> Any:
            answer = await running.trainer.post("/rewards", json={**mine, **given})
            assert answer.status_code == 201, answer.text
            return answer.json()

        for_call = await give(value=0.25, call_id=calls[0].call_id, detail={"why": "a detour"})
        assert (for_call["value"], for_call["call_id"], for_call["detail"]) == (
            *(0.25, calls[0].call_id, {"why": "a detour"}),
        )
        await give(value=0.5, trace_id=traces[0].trace_id)
        detail = await running.get(f"/rollouts/{row['rollout_id']}")
        assert detail["reward"] == 1.0
        later = await give(value=None)
        assert later["created_at"] > for_call["created_at"]
        detail = await running.get(f"/rollouts/{row['rollout_id']}")
        assert detail["reward"] is None  # the newest reward is null, which is not 0
        assert [(one["source"], one["value"]) for one in detail["rewards"]] == [
            *(("tests", 1.0), ("human:anna", 0.25), ("human:anna", 0.5), ("human:anna", None)),
        ]
        assert (await running.store.traces.find(rollout_id=row["rollout_id"]))[0].reward == 0.5
        for wrong in ({"call_id": "call_none"}, {"trace_id": "trace_none"}, {"rollout_id": "roll_none"}):
            await running.post("/rewards", {**mine, "value": 1.0, **wrong}, status=404)
        for wrong in ({"call_id": "a", "trace_id": "b"}, {"source": ""}, {"value": "nan"}):
            await running.post("/rewards", {**mine, "value": 1.0, **wrong}, status=422)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"temperature": 0.5, "max_tokens": 64, "prompt_mode": "render"},
        {"temperature": 1.0, "max_calls": 9, "max_idle_seconds": 60.0, "at_budget": "stop"},
    ],
)
async def test_session_settings_override_the_agent(serve_api: ServeApi, policy: dict[str, Any]) -> None:
    async with serve_api() as running:
        made = await running.post("/sessions", {"label": "laptop", **policy}, status=201)
        assert made["key"].startswith("sk-polar-")
        row = await running.store.sessions.get(made["session_id"])
        assert row is not None
        # A temperature also switches off what would cut or change the distribution.
        whole = whole_distribution(policy["temperature"]) if policy else {}
        assert (row.label, row.origin, row.policy) == ("laptop", "key", {**whole, **policy} or None)
        refused = await running.admin.get("/jobs", headers={"authorization": f"Bearer {made['key']}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
