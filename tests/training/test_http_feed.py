"""A trainer on a feed over HTTP gets the same groups and weights as one on the store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn

from polar_proxy.api import allow_all, create_api
from polar_proxy.client import AsyncClient, Client, UnauthorisedError, UnreachableError
from polar_proxy.client.inprocess import InProcessTransport
from polar_proxy.config import Settings
from polar_proxy.engines.local import LocalEngine
from polar_proxy.errors import UsageError
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store
from polar_proxy.training import metrics
from polar_proxy.training.config import make_config
from polar_proxy.training.feed import HttpFeed, StoreGroupReader
from polar_proxy.training.run import ExternalRollouts, SubmittedRollouts, train_with_engine
from polar_proxy.training.weight_sync import LocalSync
from tests.training.bandit import CONFIG, Bandit, opened, trainer
from tests.training.test_resume import weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@contextlib.asynccontextmanager
async def served(store: Store, engine: LocalEngine) -> AsyncIterator[tuple[str, str]]:
    """Serve this store over HTTP; yield the server's URL and a trainer's key."""
    key = "polar-trainer-test"
    await store.api_keys.add(hash_key(key), "trainer")
    application = create_api(store, settings=Settings(), engine=engine)
    config = uvicorn.Config(application, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", key
    finally:
        server.should_exit = True
        await task


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
    return bool(ours == theirs)


@pytest.mark.parametrize("builder", ["merged", "per_call", "tree"])
async def test_group_read_over_http_equals_the_stored_one(tmp_path: Path, model: Path, builder: Any) -> None:
    async with opened(tmp_path, model) as (store, engine), served(store, engine) as (url, key):
        bandit = Bandit(store, engine, "run", 1, 3)
        await bandit.start_round(0)
        await bandit.pending_groups()
        (row,) = await store.groups.of_job((await store.jobs.find())[0].job_id)
        here = await StoreGroupReader(store).read_group(row.group_id, builder, 2)
        async with AsyncClient(url, key) as client:
            there = await HttpFeed(client, print).read_group(row.group_id, builder, 2)
    assert (there.group_id, there.task_id, there.staleness) == (here.group_id, here.task_id, 2)
    assert len(there.members) == len(here.members) == 3
    for ours, theirs in zip(here.members, there.members, strict=True):
        for name in ("rollout_id", "status", "reward", "incomplete", "masked"):
            assert getattr(theirs.rollout, name) == getattr(ours.rollout, name)
        assert len(theirs.traces) == len(ours.traces) == 1
        for one, other in zip(ours.traces, theirs.traces, strict=True):
            # Traces of builders that are not stored are built when read, and get new ids each time.
            names = {field.name for field in dataclasses.fields(one)} - (set() if builder == "merged" else {"trace_id"})
            # A row has the rollout's reward, its trace has none.
            assert {name for name in names - {"reward"} if not equal(getattr(one, name), getattr(other, name))} == set()


async def test_steps_over_http_equal_steps_from_the_store(tmp_path: Path, model: Path) -> None:
    """On the same recorded groups, in two copies of one database."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    local.mkdir()
    async with opened(local, model) as (store, engine):
        bandit = Bandit(store, engine, "others", 2, 4)
        await bandit.start_round(0)
        await bandit.pending_groups()
    shutil.copytree(local, remote)
    config = CONFIG.model_copy(update={"groups": 1, "samples": 4, "steps": 2})
    async with opened(local, model) as (store, engine):
        await trainer(local, model, store, engine, config, rollouts=ExternalRollouts()).train()
    async with (
        opened(remote, model) as (store, engine),
        served(store, engine) as (url, key),
        AsyncClient(url, key) as http,
    ):
        feed = HttpFeed(http, print)
        run = trainer(remote, model, store, engine, config, feed=feed, reader=feed, rollouts=ExternalRollouts())
        assert (await run.train()).updates == 2
        assert await store.feed.depth() == {"delivered": 2}
    ours, theirs, start = weights(local), weights(remote), weights_of(model)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert any(not torch.equal(ours[name], start[name]) for name in ours)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from polar_proxy.training.policy.model import load_model

    return {name: parameter.detach() for name, parameter in load_model(folder).named_parameters()}


async def test_trainer_on_groups_that_others_submit(tmp_path: Path, model: Path, polar_home: Path) -> None:
    """All of `polar train grpo --feed` except vLLM: staleness is bounded, and groups that are too stale are dropped."""
    async with opened(tmp_path, model) as (store, engine), served(store, engine) as (url, key):
        bandit = Bandit(store, engine, "others", 1, 8)  # enough that rewards of a group rarely are all equal
        await engine.load_weights(weights_of(model), "0")

        async def submit_rounds() -> None:
            """Stay a few groups ahead of the trainer, so that the last of them become stale."""
            for number in itertools.count():
                while (await store.feed.depth()).get("waiting", 0) >= 4:
                    await asyncio.sleep(0.05)
                await bandit.start_round(number)
                await bandit.pending_groups()

        settings = Settings(api_key=key)
        settings.engine.model = str(model)
        given = {"feed": url, "max_async_steps": 1, "samples": 8, "groups": 1, "steps": 3, "learning_rate": 1e-3}
        config = make_config(given, {"wait_seconds": 60})
        reported: list[str] = []
        submitting = asyncio.create_task(submit_rounds())
        try:
            sync = LocalSync(engine)
            state = await train_with_engine(
                settings, config, tmp_path / "run", key, reported.append, engine=engine, weight_sync=sync
            )
        finally:
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
        assert (state.step, state.updates) == (3, 3)
        assert any(line.startswith(f"feed: {url}") for line in reported)
        steps = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "step"]
        assert max(step["staleness"] for step in steps) <= 1
        depth = await store.feed.depth()
        assert depth["delivered"] == 3
        assert depth.get("dropped", 0) == sum(step["dropped_stale"] for step in steps)
        (run,) = await store.training.runs()
        assert (run.name, run.step) == ("run", 3)
        assert await store.training.lines(run.run_id) == list(metrics.read_lines(tmp_path / "run"))


async def test_unreachable_feed_is_reported_once(tmp_path: Path, model: Path) -> None:
    """Leasing returns no groups, so that the trainer keeps asking; an invalid key raises at once."""
    reported: list[str] = []
    async with opened(tmp_path, model) as (store, engine):
        async with served(store, engine) as (url, key), AsyncClient(url, key, tries=1) as client:
            feed = HttpFeed(client, reported.append)
            bandit = Bandit(store, engine, "run", 1, 2)
            await bandit.start_round(0)
            await bandit.pending_groups()
            (lease,) = (await feed.lease("me", 5, 60, policy_version=None, max_staleness=None)).leases
            assert await feed.extend(lease.lease_id, 90) > lease.expires_at
            async with AsyncClient(url, "polar-trainer-other") as other:
                with pytest.raises(UnauthorisedError):
                    await HttpFeed(other, print).lease("me", 1, 9, policy_version=None, max_staleness=None)
        async with AsyncClient(url, key, tries=1) as client:
            feed = HttpFeed(client, reported.append)
            for _ in range(2):
                offer = await feed.lease("me", 5, 60, policy_version=None, max_staleness=None)
                assert (offer.leases, offer.dropped) == ((), ())
            assert len(reported) == 1
            assert "cannot be reached" in reported[0]
            with pytest.raises(UnreachableError):
                await feed.acknowledge(lease.lease_id)


def test_rejects_settings_that_need_a_feed_or_jobs() -> None:
    feed = {"feed": "http://127.0.0.1:1"}
    for settings, message in (
        ({"submit_jobs": True}, "`submit_jobs` needs `feed`"),
        (feed | {"max_async_steps": 1, "eval_every": 2}, "`eval_every` needs `submit_jobs`"),
    ):
        with pytest.raises(UsageError, match=message):
            make_config(settings)
    assert make_config(feed | {"submit_jobs": True, "eval_every": 2}).max_async_steps == 0


async def test_submitted_rounds_are_idempotent(tmp_path: Path, model: Path, polar_home: Path) -> None:
    """A round that is started twice, as by a resumed run, has one job per instance."""
    config = make_config(
        {"feed": "x", "submit_jobs": True, "groups": 2, "samples": 3, "eval_every": 1, "eval_instances": 2}
    )
    settings = Settings(run={"harness": "shell:true"})
    async with opened(tmp_path, model) as (store, _):
        application = create_api(store, settings=settings, auth=allow_all)
        async with AsyncClient("http://in-process", transport=InProcessTransport(application)) as client:
            rollouts = SubmittedRollouts(client, config, settings.run.job_spec(label="run_1"), "run_1")
            for _ in range(2):
                await rollouts.start_round(4)
            assert await rollouts.pending_groups() == 2
            jobs = await store.jobs.find()
            evaluating = asyncio.create_task(rollouts.evaluate(7))
            while len(await store.jobs.find()) < 4:
                await asyncio.sleep(0.05)
            for job in (await store.jobs.find())[:2]:
                assert (job.priority, job.rollouts) == (10, {"queued": 1})
                await client.cancel(job.job_id)
            assert await evaluating == [None, None]
        rows = [row for job in jobs for row in await store.rollouts.find(job_id=job.job_id)]
    assert sorted(row.seed for row in rows if row.seed) == [10_000_008] * 3 + [10_000_009] * 3
    assert {row.config["harness"] for row in rows} == {"shell:true"}
    assert {job.label for job in jobs} == {"run_1"}


async def test_example_of_a_custom_trainer(tmp_path: Path, model: Path) -> None:
    from examples.trainer_over_http.train import train

    async with opened(tmp_path, model) as (store, engine), served(store, engine) as (url, key):
        bandit = Bandit(store, engine, "others", 2, 4)
        await bandit.start_round(0)
        await bandit.pending_groups()

        def train_example() -> dict[str, torch.Tensor]:
            with Client(url, key) as polar:
                trained = train(polar, model, steps=2, groups=1, wait=60.0)
            return {name: parameter.detach() for name, parameter in trained.named_parameters()}

        after = await asyncio.to_thread(train_example)
        assert await store.feed.depth() == {"delivered": 2}
    before = weights_of(model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
