"""The training loop: groups from the feed, a batch, a step, a checkpoint, the acknowledgement, new weights.

    ask for rollouts -> lease groups -> batch -> step -> checkpoint -> acknowledge -> sync and probe

Promises, across `kill -9` at any moment (tests/training/test_resume.py kills at every point between):

* A group is acknowledged only after a checkpoint that holds what it taught is on disk. So nothing is skipped: what no
  checkpoint holds comes back when its lease is returned or runs out.
* A checkpoint names the groups it holds. A group that it names is acknowledged when it is offered again, and never
  trained again.
* A round of rollouts is asked for under its own number; asking twice is asking once.

Synchronous (`ahead = 0`): the rollouts of a step begin when the weights before it are in the engine. Asynchronous:
those of the next `ahead` steps are asked for early, and what has gone too stale when it is finished is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import orjson

from polar_proxy.engines.base import Engine
from polar_proxy.errors import UsageError
from polar_proxy.store.feed import GroupLease
from polar_proxy.training import checkpoint
from polar_proxy.training.batch import TrainingBatch, TrainingGroup, has_signal, make_batch
from polar_proxy.training.checkpoint import TrainerState
from polar_proxy.training.config import GrpoConfig, differences
from polar_proxy.training.failures import TrainingError
from polar_proxy.training.feed import GroupFeed, OpenLeases
from polar_proxy.training.metrics import MetricsLog, StepTimer, drop_lines_after, mean_with_interval
from polar_proxy.training.model import Learner
from polar_proxy.training.published import MetricsSink
from polar_proxy.training.reading import GroupReader
from polar_proxy.training.tally import StepStats
from polar_proxy.training.weight_sync import WeightSync, probe, probe_ids
from polar_proxy.types import Json

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
EMPTY_ROUNDS = 3
"""So many rounds in a row without one finished group, and the run stops."""


class RolloutSource(Protocol):
    """What the trainer asks of whoever runs rollouts. Finished groups come through the feed, not through here."""

    async def start(self, round_number: int) -> None:
        """Ask for the groups of this round. Asking again for the same round, by any process, changes nothing."""
        ...

    async def under_way(self) -> int:
        """Groups asked for that may still come into the feed. Raises where none can come any more."""
        ...

    async def evaluate(self, step: int) -> list[float | None]:
        """Roll out the held-out instances with the engine's weights of now, beside the feed; their rewards."""
        ...


def _nothing(point: str) -> None:
    """Called at each named point of the loop; a test puts a fault here."""


class GrpoTrainer:
    """One run in the folder `run`. `await trainer.train()` begins it, or takes up its last checkpoint."""

    def __init__(
        self,
        run: Path,
        config: GrpoConfig,
        learner: Learner,
        *,
        model: Path,
        engine: Engine,
        sync: WeightSync,
        feed: GroupFeed,
        reader: GroupReader,
        rollouts: RolloutSource,
        busy: Callable[[], float] | None = None,
        published: MetricsSink | None = None,
        at: Callable[[str], None] = _nothing,
        note: Callable[[str], None] = log.info,
    ) -> None:
        """`model`: the folder that the learner was loaded from. `busy`: seconds so far in which a call was with the
        engine. `published`: where the run's lines are told, too. `note` gets lines for people."""
        self._run, self._config, self._learner, self._model = run, config, learner, model
        self._engine, self._sync, self._reader, self._rollouts = engine, sync, reader, rollouts
        self._at, self._note = at, note
        self._leases = OpenLeases(feed, run, config.lease_seconds, note)
        self._metrics = MetricsLog(run, published)
        self._busy = busy
        self.state = TrainerState(0, 0, "0", ())
        self._unsaved: list[str] = []
        """Groups trained since the last checkpoint."""
        self._probed: list[float] | None = None
        self._noise: float | None = None
        self._since = time.monotonic()

    async def train(self) -> TrainerState:
        """Until `config.steps` are done. Raises TrainingError with the reason where it cannot go on."""
        with self._alone():
            lost = self._resume()
            with self._metrics:
                await self._leases.after_a_kill(self.state.trained)
                async with self._leases.kept():
                    self._metrics.write("start", self.state.step, {"steps_lost": lost})
                    await self._send_weights()
                    self._window = StepTimer(self._busy)
                    if self.state.step == 0:
                        await self._evaluate()
                    await self._metrics.publish()
                    while self.state.step < self._config.steps:
                        await self._step()
        return self.state

    async def _step(self) -> None:
        config, began = self._config, time.perf_counter()
        groups, dropped = await self._groups()
        leased = time.perf_counter()
        self._at("leased")
        batch = make_batch(groups, config)
        stats = await asyncio.to_thread(self._learner.update, batch, self.state.step) if batch.sequences else None
        self._at("trained")
        self._unsaved += batch.group_ids
        self._advance(updated=stats is not None)
        times = {"waiting_seconds": leased - began, "training_seconds": time.perf_counter() - leased}
        self._write(batch, stats, dropped, {"rollouts_seconds": _seconds_between(groups), **times})
        last = self.state.step == config.steps
        if last or self.state.step % config.checkpoint_every == 0:
            await self._save()
        if last or self.state.step % config.sync_every == 0:
            await self._send_weights()
        self._at("synced")
        if last or (config.eval_every and self.state.step % config.eval_every == 0):
            await self._evaluate()
        await self._metrics.publish()

    # Groups

    async def _groups(self) -> tuple[list[TrainingGroup], int]:
        """The next step's groups, leased: as many as a step has, or what there is once no more can come."""
        config, found = self._config, list[TrainingGroup]()
        dropped = empty = 0
        bound = config.staleness_bound
        while self.state.rounds <= self.state.step + config.ahead and self.state.rounds < config.steps:
            await self._ask()
        deadline = time.monotonic() + config.wait_seconds
        room = config.groups
        while room:
            # Asked before the feed is read: a group that ends in between is in the feed then.
            under_way = await self._rollouts.under_way()
            offer = await self._leases.take(self._run.name, room, step=self.state.step, max_staleness=bound)
            dropped += len(offer.dropped)
            for lease in offer.leases:
                if lease.group_id in self.state.trained:  # an acknowledgement was lost, or came too late
                    await self._acknowledge(lease)
                elif lease.group_id not in self._unsaved:  # else: the next checkpoint's acknowledgement is its own
                    group = await self._reader.read_group(lease.group_id, config.builder, lease.staleness)
                    found.append(group)
                    room -= not config.refill or has_signal(group, config)
            if offer.leases or offer.dropped:
                deadline = time.monotonic() + config.wait_seconds
            elif under_way == 0 and found and (not config.refill or empty == EMPTY_ROUNDS):
                break  # groups were dropped or cancelled, or teach nothing: a smaller step rather than none
            elif under_way == 0:
                if (empty := empty + 1) > EMPTY_ROUNDS:
                    raise TrainingError(
                        f"{EMPTY_ROUNDS} rounds of rollouts in a row ended without one group to train on ({dropped} "
                        "were too stale, or of an unknown policy version): `polar sessions` shows what became of them"
                    )
                await self._ask()
            elif time.monotonic() > deadline:
                raise TrainingError(
                    f"no group came from the rollouts for {config.wait_seconds:g} s ({under_way} are under way): look "
                    "at them with `polar sessions`, or raise wait_seconds"
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
        return found, dropped

    async def _ask(self) -> None:
        await self._rollouts.start(self.state.rounds)
        self.state = replace(self.state, rounds=self.state.rounds + 1)

    async def _acknowledge(self, lease: GroupLease) -> None:
        """What is acknowledged need not be known any more; what could not be is offered again, and known by its id."""
        if await self._leases.acknowledge(lease):
            left = tuple(group for group in self.state.trained if group != lease.group_id)
            self.state = replace(self.state, trained=left)

    # Checkpoints

    def _advance(self, *, updated: bool) -> None:
        now, step = time.monotonic(), self.state.step + 1
        self.state = replace(
            self.state,
            step=step,
            version=str(step),
            updates=self.state.updates + updated,
            minutes=self.state.minutes + (now - self._since) / 60,
        )
        self._since = now

    async def _save(self) -> None:
        """Checkpoint first; then the groups that it holds may be told to be done with."""
        began = time.perf_counter()
        self.state = replace(self.state, trained=(*self.state.trained, *self._unsaved))
        # Of several processes they are gathered first, and the gateway answers agents meanwhile.
        weights = await asyncio.to_thread(self._learner.weights)
        optimiser = await asyncio.to_thread(self._learner.state)
        keep = self._config.keep_checkpoints
        await asyncio.to_thread(
            checkpoint.save, self._run, self.state, weights, optimiser, model=self._model, keep=keep
        )
        self._unsaved = []
        self._metrics.write("checkpoint", self.state.step, {"seconds": time.perf_counter() - began})
        self._at("saved")
        for lease in self._leases:
            if lease.group_id in self.state.trained:
                await self._acknowledge(lease)
                self._at("acknowledged one")
        self._at("acknowledged")

    def _resume(self) -> int:
        """Take up the last checkpoint, if there is one; returns how many steps were lost with the process."""
        began_with, folder = self._run / "config.json", checkpoint.latest(self._run)
        if folder is not None:
            if wrong := differences(orjson.loads(began_with.read_bytes()), self._config):
                told = ", ".join(f"{name} was {then!r} and is {now!r}" for name, (then, now) in wrong.items())
                raise UsageError(f"The run {self._run} began otherwise: {told}. Give this one another name.")
            found = checkpoint.load(folder)
            self._learner.restore(found.weights, found.optimiser)
            self.state = found.state
            self._note(f"resumed from {folder.name}")
        checkpoint.write_file(began_with, orjson.dumps(self._config.to_json(), option=orjson.OPT_INDENT_2))
        return drop_lines_after(self._run, self.state.step)

    # Weights

    async def _send_weights(self) -> None:
        """Into the engine, and the proof. Their version is the number of steps that made them."""
        began = time.perf_counter()
        ids = probe_ids(self._learner.vocabulary)
        now = await asyncio.to_thread(self._learner.logprobs, ids)
        version = str(self.state.step)
        await self._sync.push(await asyncio.to_thread(self._learner.weights), version)
        found = await probe(self._engine, ids, now, self._probed, self._config.probe_tolerance, self._noise)
        self._probed, self._noise = now, found.mean if self._noise is None else self._noise
        told = await self._engine.weight_version()
        if told not in (None, version):
            raise TrainingError(
                f"after the sync to version {version} the engine says that its weights are version {told}: another "
                "program gives it weights, too. Its samples would be of neither policy; let only this run update it"
            )
        seconds = time.perf_counter() - began
        values = {"version": version, "engine": told, "seconds": seconds}
        self._metrics.write("sync", self.state.step, {**values, **found.to_json()})

    async def _evaluate(self) -> None:
        if not self._config.eval_every:
            return
        began = time.perf_counter()
        with self._window.left_out():
            found = await self._rollouts.evaluate(self.state.step)
        rewards = [reward for reward in found if reward is not None]
        values = mean_with_interval(rewards) | {"solved_share": _solved(rewards)}
        self._metrics.write("eval", self.state.step, {**values, "seconds": time.perf_counter() - began})
        self._note(f"held out, after {self.state.step} steps: reward {values['reward']}")

    def _write(self, batch: TrainingBatch, stats: StepStats | None, dropped: int, times: Json) -> None:
        """The line of a step. It stands before the checkpoint does; if that never comes, a resumed run drops it."""
        lengths = [int(sequence.trained.sum()) for sequence in batch.sequences]
        seconds = times["waiting_seconds"] + times["training_seconds"]
        values: Json = {
            **mean_with_interval(batch.rewards),
            "solved_share": _solved(batch.rewards),
            "groups": list(batch.group_ids),
            "rollouts": batch.rollouts,
            "trained_rollouts": batch.trained_rollouts,
            "sampled_tokens": batch.sampled_tokens,
            "trained_tokens": batch.trained_tokens,
            "left_out": batch.left_out_json(),
            "dropped_stale": dropped,
            "staleness": max(batch.staleness, default=None),
            "length_mean": sum(lengths) / len(lengths) if lengths else None,
            "length_max": max(lengths, default=None),
            "tokens_per_second": batch.sampled_tokens / seconds,
            "rollouts_per_second": batch.rollouts / seconds,
            "updated": stats is not None,
            **({} if stats is None else stats.to_json()),
            **times,
            **self._window.close(),
        }
        self._metrics.write("step", self.state.step, values)
        self._note(f"step {self.state.step}: reward {values['reward']}, {batch.trained_tokens} tokens trained")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No second trainer in the same folder. The lock goes with the process, however it ends."""
        self._run.mkdir(parents=True, exist_ok=True)
        with (self._run / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"Another process is training in {self._run}.") from None
            yield


def _seconds_between(groups: Sequence[TrainingGroup]) -> float | None:
    """From the begin of the first rollout of these groups to the end of the last."""
    rollouts = [member.rollout for group in groups for member in group.members]
    began = [rollout.started_at for rollout in rollouts if rollout.started_at is not None]
    ended = [rollout.ended_at for rollout in rollouts if rollout.ended_at is not None]
    return max(ended) - min(began) if began and ended else None


def _solved(rewards: Sequence[float]) -> float | None:
    return sum(reward >= 1.0 for reward in rewards) / len(rewards) if rewards else None
