"""What `signs` does to a solved task with a suspicious patch: from the command line and the API to the trainer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.client import AsyncClient
from polar_proxy.store import Store, open_store
from polar_proxy.training.batch import TrainingBatch, TrainingGroup, make_batch
from polar_proxy.training.config import make_config
from polar_proxy.training.feed import HttpFeed, StoreGroupReader
from tests.api.conftest import ServeApi, job_request, make_key
from tests.api.test_feed import lease
from tests.api.test_jobs import until_ended
from tests.cli.runner import polar_json, polar_ok

pytestmark = pytest.mark.slow

SIGN = "changes_test_runner"


def batch_of(group: TrainingGroup) -> TrainingBatch:
    """Return the batch of a group whose rewards are all equal, with its rollouts."""
    return make_batch([group], make_config({"task": "swe-task", "keep_zero_variance_groups": True}))


def check_batch(batch: TrainingBatch, reward: float, masked: bool) -> None:
    assert batch.rewards == (reward, reward)  # also in the baseline of a rollout that is excluded
    plan = batch.plan
    assert plan.sampled_tokens > 0
    if masked:
        assert (batch.sequences, plan.trained_tokens) == ((), 0)
        assert plan.skipped["masked"].rollouts == 2
        assert plan.skipped["masked"].tokens == plan.sampled_tokens
    else:
        assert (plan.trained_rollouts, plan.trained_tokens, plan.skipped) == (2, plan.sampled_tokens, {})


def check_detail(detail: dict[str, Any], policy: str | None) -> None:
    assert detail["signs"] == [SIGN]
    assert detail["solved"] == (policy != "zero")
    assert detail.get("reward_without_signs") == (1.0 if policy == "zero" else None)


@pytest.mark.parametrize(("policy", "reward", "masked"), [(None, 1.0, False), ("exclude", 1.0, True)])
def test_signs_through_polar_run(
    polar_home: Path, tmp_path: Path, policy: str | None, reward: float, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_ADMISSION__MEMORY_MB", "0")
    agent = ("--engine", "tests.fakes.player:PlayerEngine", "--harness", "tests.fakes.tiny_agent:SuspiciousAgent")
    signs = () if policy is None else ("--signs", policy)
    polar_json("run", "swe-task", *agent, "--sandbox", "process", "--samples", "2", *signs)
    polar_ok("export", "--format", "jsonl", "--out", str(tmp_path / "rows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert {(row["reward"], row["masked"]) for row in rows} == {(reward, masked)}
    check_batch(batch_of(asyncio.run(check_stored(polar_home, policy, reward, masked))), reward, masked)


async def check_stored(home: Path, policy: str | None, reward: float, masked: bool) -> TrainingGroup:
    """Check the stored rollouts, and return them as the trainer reads them."""
    async with open_store(f"sqlite:///{home}/polar.db", create=False) as store:
        rollouts = await store.rollouts.find()
        assert [(row.status, row.reward, row.masked) for row in rollouts] == [("done", reward, masked)] * 2
        for row in rollouts:
            (given,) = await store.rewards.of_rollout(row.rollout_id)
            check_detail(given.detail, policy)
        return await StoreGroupReader(store).read_group(rollouts[0].group_id, "merged", 0)


@pytest.mark.parametrize(
    ("policy", "reward", "masked"), [("note", 1.0, False), ("zero", 0.0, False), ("exclude", 1.0, True)]
)
async def test_signs_through_the_api(
    serve_api: ServeApi, store: Store, policy: str, reward: float, masked: bool
) -> None:
    async with serve_api(work=True) as running:
        request = job_request("SuspiciousAgent", 2, for_training=True, signs=policy)
        job = await running.post("/jobs", request, status=201)
        await until_ended(running, job["job_id"])
        rollouts = (await running.get(f"/jobs/{job['job_id']}/rollouts"))["rollouts"]
        assert [(row["reward"], row["masked"]) for row in rollouts] == [(reward, masked)] * 2
        for row in rollouts:
            (given,) = (await running.get(f"/rollouts/{row['rollout_id']}"))["rewards"]
            check_detail(given["detail"], policy)
        (one,) = (await lease(running))["leases"]
        async with AsyncClient(running.gateway.url, await make_key(store, "trainer")) as client:
            group = await HttpFeed(client, print).read_group(one["group_id"], "merged", 0)
    check_batch(batch_of(group), reward, masked)
