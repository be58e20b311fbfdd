"""Resuming after a kill: by an injected fault at every named point of the loop, and once by SIGKILL.

A fault leaves the same state as a kill: nothing is released, acknowledged or written on the way out.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from sqlalchemy import update

from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.store import schema
from polar_proxy.training import metrics
from polar_proxy.training.policy import checkpoint
from tests.training.bandit import CONFIG, Bandit, opened, trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SMALL = CONFIG.model_copy(update={"samples": 4})
POINTS = ("leased", "trained", "saved", "acknowledged one", "acknowledged", "synced")


class Killed(BaseException):
    pass


def kill_at(point: str, nth: int) -> Callable[[str], None]:
    """Return a callback that raises Killed when `point` is passed for the `nth` time."""
    seen: Counter[str] = Counter()

    def on_point(current: str) -> None:
        seen[current] += 1
        if (current, seen[current]) == (point, nth):
            raise Killed

    return on_point


def groups_by_step(folder: Path) -> list[list[str]]:
    return [line["groups"] for line in metrics.read_lines(folder / "run") if line["kind"] == "step"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    last = checkpoint.latest(folder / "run")
    assert last is not None
    return checkpoint.load(last).weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, torch.Tensor]:
    """Return the weights after the same run without a kill."""
    folder = tmp_path_factory.mktemp("undisturbed")

    async def run() -> None:
        async with opened(folder, model) as (store, engine):
            await trainer(folder, model, store, engine, SMALL).train()

    asyncio.run(run())
    return weights(folder)


@pytest.mark.parametrize(
    ("point", "every"), [*((point, 1) for point in POINTS), ("trained", 3), ("leased", 2)], ids=lambda value: str(value)
)
async def test_every_group_is_trained_once(
    tmp_path: Path, model: Path, undisturbed: dict[str, torch.Tensor], point: str, every: int
) -> None:
    """Killed in the second step, then in the next one; with `every` = 3 there is no checkpoint by then."""
    config = SMALL.model_copy(update={"checkpoint_every": every})
    async with opened(tmp_path, model) as (store, engine):
        for number in (2, 1):
            with pytest.raises(Killed):
                await trainer(tmp_path, model, store, engine, config, on_point=kill_at(point, number)).train()
        state = await trainer(tmp_path, model, store, engine, config).train()
        assert (state.step, state.updates) == (3, 3)
        trained = groups_by_step(tmp_path)
        assert [len(groups) for groups in trained] == [1, 1, 1]
        assert len({group for groups in trained for group in groups}) == 3
        # Every group that was rolled out was trained once and acknowledged.
        assert await store.feed.depth() == {"delivered": 3}
    # Samples have fixed seeds, so the weights are the same as without the kills.
    for name, tensor in weights(tmp_path).items():
        assert torch.allclose(tensor, undisturbed[name], atol=1e-5), name


async def test_group_with_a_lost_acknowledgement_is_not_trained_again(tmp_path: Path, model: Path) -> None:
    """The lease expired after the checkpoint: the group is offered again, and only acknowledged."""
    async with opened(tmp_path, model) as (store, engine):

        class ExpiringFeed:
            """A feed whose leases expire before the groups of a checkpoint are acknowledged."""

            expired = False

            def __getattr__(self, name: str) -> Any:
                return getattr(store.feed, name)

            async def acknowledge(self, lease_id: str) -> None:
                if self.expired:
                    async with store.database.writing() as connection:
                        mine = schema.leases.c.lease_id == lease_id
                        await connection.execute(update(schema.leases).where(mine).values(expires_at=1.0))
                await store.feed.acknowledge(lease_id)

        feed = ExpiringFeed()

        def on_point(point: str) -> None:
            feed.expired = point == "saved" or (feed.expired and point == "acknowledged one")

        short = SMALL.model_copy(update={"steps": 2})
        state = await trainer(tmp_path, model, store, engine, short, on_point=on_point, feed=feed).train()
        assert (state.step, state.trained != ()) == (2, True)
        assert await store.feed.depth() == {"delivered": 1, "waiting": 1}
        await trainer(tmp_path, model, store, engine, SMALL).train()
        assert len({group for groups in groups_by_step(tmp_path) for group in groups}) == 3
        assert await store.feed.depth() == {"delivered": 3}


async def test_rejects_changed_settings_of_a_resumed_run(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path, model) as (store, engine):
        await trainer(tmp_path, model, store, engine, SMALL.model_copy(update={"steps": 1})).train()
        with pytest.raises(UsageError, match=r"learning_rate was 0\.001"):
            await trainer(tmp_path, model, store, engine, SMALL.model_copy(update={"learning_rate": 0.1})).train()


async def test_run_stops_when_no_group_comes(tmp_path: Path, model: Path) -> None:
    class IdleSource(Bandit):
        async def start_round(self, number: int) -> None:
            pass

    async with opened(tmp_path, model) as (store, engine):
        idle: Any = IdleSource(store, engine, "idle", 1, 4)
        with pytest.raises(TrainingError, match="3 rounds of rollouts"):
            await trainer(tmp_path, model, store, engine, SMALL, rollouts=idle).train()


def test_checkpoint_is_complete_or_absent(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = checkpoint.TrainerState(1, 1, "1", ("group_a",))
    tensors = {"w": torch.arange(3.0)}
    first = checkpoint.save(tmp_path, state, tensors, {}, model=model, keep=1)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in first.iterdir()}

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("os.rename", killed)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, checkpoint.TrainerState(2, 2, "2", ()), tensors, {}, model=model, keep=1)
    assert checkpoint.latest(tmp_path) == first
    loaded = checkpoint.load(first)
    assert (loaded.state.step, loaded.state.trained, loaded.weights["w"].tolist()) == (1, ("group_a",), [0.0, 1.0, 2.0])
    second = checkpoint.save(tmp_path, checkpoint.TrainerState(2, 2, "2", ()), tensors, {}, model=model, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [second.name]


def test_run_resumes_after_sigkill(tmp_path: Path, model: Path) -> None:
    """Another process is killed shortly after its first checkpoint; this process resumes the run."""
    import subprocess

    config = CONFIG.model_copy(update={"steps": 60})
    argv = [sys.executable, "-m", "tests.training.bandit", str(tmp_path), str(model), str(config.steps)]
    process = subprocess.Popen(argv, cwd=Path(__file__).resolve().parents[2])
    try:
        deadline = time.monotonic() + 240
        while checkpoint.latest(tmp_path / "run") is None:
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = checkpoint.latest(tmp_path / "run")
    assert last is not None
    done = orjson.loads((last / "state.json").read_bytes())["step"]

    async def resume() -> dict[str, int]:
        async with opened(tmp_path, model) as (store, engine):
            # A lease that the process took and could not record expires in a minute; here it expires at once.
            written = [row["lease_id"] for row in orjson.loads((tmp_path / "run" / "leases.json").read_bytes())]
            async with store.database.writing() as connection:
                left = schema.leases.c.ended_at.is_(None) & schema.leases.c.lease_id.not_in(written)
                await connection.execute(update(schema.leases).where(left).values(expires_at=1.0))
            # The dead process's claims on rollouts expire in a minute; here they are reclaimed at once.
            await store.queue.heartbeat("bandit", [row.rollout_id for row in await store.rollouts.interrupted()], -1)
            await store.queue.reclaim_expired(attempts=3)
            for group_id in await store.groups.unsettled():  # it was killed after the last rollout and before settling
                await store.groups.settle(group_id)
            config_now = config.model_copy(update={"steps": done + 2})
            state = await trainer(tmp_path, model, store, engine, config_now).train()
            assert state.step == done + 2
            return await store.feed.depth()

    depth = asyncio.run(resume())
    trained = [group for groups in groups_by_step(tmp_path) for group in groups]
    assert len(trained) == len(set(trained)) == done + 2
    assert depth == {"delivered": done + 2}
