"""The training loop of GRPO: `GrpoTrainer._step` is one step from top to bottom.

    start rollouts -> lease groups -> advantages and batch -> loss and optimiser -> metrics
                   -> checkpoint -> acknowledge groups -> new weights into the engine -> probe

Promises that hold even after `kill -9` at any moment (tests/training/test_resume.py kills the trainer at each point of
the loop):

* A group is acknowledged only when a checkpoint is on disk whose weights were trained on the group. A group that is in
  no checkpoint is offered again when its lease is returned or expires, so no group is skipped.
* A checkpoint lists its groups. A listed group that is offered again is acknowledged and not trained again.
* Each round of rollouts has a number. A second start of the round with this number has no effect.

Synchronous (`max_async_steps = 0`): the rollouts of a step start when the weights of the step before are in the engine.
Asynchronous: the rollouts of the next `max_async_steps` steps start early, and groups that are too stale are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import orjson

from polar_proxy.engines.base import Engine
from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.store.service.feed import GroupLease
from polar_proxy.training.batch import TrainingBatch, TrainingGroup, has_signal, make_batch
from polar_proxy.training.config import GrpoConfig, changed_settings
from polar_proxy.training.feed import GroupFeed, GroupReader, OpenLeases
from polar_proxy.training.metrics import MetricsLog, MetricsSink, StepTimer, drop_lines_after, reward_stats
from polar_proxy.training.policy import checkpoint
from polar_proxy.training.policy.checkpoint import TrainerState
from polar_proxy.training.policy.model import Learner
from polar_proxy.training.step_stats import StepStats
from polar_proxy.training.trackers import MetricsTracker
from polar_proxy.training.weight_sync import WeightSync, probe, probe_ids
from polar_proxy.types import Json

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
MAX_EMPTY_ROUNDS = 3
"""Maximum number of additional rounds that are started for one step. If the step has no group after these rounds, the
run stops with an error."""


class RolloutSource(Protocol):
    """Runs rollouts for the trainer. Finished groups arrive through the feed."""

    async def start_round(self, number: int) -> None:
        """Start the rollouts of a round. Idempotent, also across processes."""
        ...

    async def pending_groups(self) -> int:
        """Return the number of groups that may still come into the feed."""
        ...

    async def evaluate(self, step: int) -> list[float | None]:
        """Run the held-out instances with the engine's current weights, and return the rewards.

        The feed does not offer these rollouts.
        """
        ...


class GrpoTrainer:
    """One run in the folder `run`. `await trainer.train()` starts it, or resumes it from its last checkpoint."""

    def __init__(
        self,
        run: Path,
        config: GrpoConfig,
        learner: Learner,
        *,
        model: Path,
        engine: Engine,
        weight_sync: WeightSync,
        feed: GroupFeed,
        reader: GroupReader,
        rollouts: RolloutSource,
        engine_busy_seconds: Callable[[], float] | None = None,
        sink: MetricsSink | None = None,
        observer: MetricsTracker | None = None,
        on_point: Callable[[str], None] = lambda point: None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        """`model`: the folder that the learner was loaded from. `engine_busy_seconds`: total seconds in which the
        engine had at least one call. `sink` gets copies of the metrics. `observer` gets each line of the metrics as it
        is written. `on_point` is called at each named point of the loop, so that tests can inject faults. `report`
        takes progress lines for people."""
        self._run, self._config, self._learner, self._model = run, config, learner, model
        self._engine, self._weight_sync, self._reader, self._rollouts = engine, weight_sync, reader, rollouts
        self._engine_busy_seconds, self._on_point, self._report = engine_busy_seconds, on_point, report
        self._leases = OpenLeases(feed, run, config.lease_seconds, report)
        self._metrics = MetricsLog(run, sink, report_to=config.report_to, config=config.to_json(), observer=observer)
        self.state = TrainerState(0, 0, "0", ())
        self._unsaved: list[str] = []
        """Groups trained since the last checkpoint."""
        self._last_probe: list[float] | None = None
        """The log-probabilities that the trainer computed for the probe's tokens at the last weight sync."""
        self._probe_noise: float | None = None
        """Mean difference between the engine's and the trainer's log-probabilities of the probe's tokens, in nats. It
        is measured at the first weight sync."""
        self._last_step_ended = time.monotonic()

    async def train(self) -> TrainerState:
        """Train until `config.steps` are done. Raises TrainingError when the run cannot continue.

        Raises UsageError if another process trains this run. Raises UsageError if the run is resumed with another value
        of a setting that must stay the same.
        """
        config = self._config
        with self._locked_run():
            steps_lost = self._resume()
            with self._metrics:
                await self._leases.settle_previous(self.state.trained)
                async with self._leases.kept_alive():
                    self._metrics.write("start", self.state.step, {"steps_lost": steps_lost, **self._precisions()})
                    await self._sync_weights()
                    timer = StepTimer(self._engine_busy_seconds)
                    if self.state.step == 0:
                        await self._evaluate(timer)
                    await self._metrics.publish()
                    while self.state.step < config.steps:
                        await self._step(timer)
        return self.state

    def _precisions(self) -> Json:
        """Return the precisions of engine and trainer, and report a difference."""
        engine, trainer = self._engine.info.precision, self._config.dtype
        if engine not in (None, trainer):
            self._report(f"the engine samples in {engine} and the trainer computes in {trainer}: expect a mismatch")
        return {"engine_precision": engine, "trainer_precision": trainer}

    async def _step(self, timer: StepTimer) -> None:
        config, started = self._config, time.perf_counter()
        # 1. Lease finished groups of rollouts from the feed.
        groups, stale = await self._lease_groups()
        leased = time.perf_counter()
        self._on_point("leased")
        # 2. Compute advantages; collect the sequences to train and count what is skipped.
        batch = make_batch(groups, config, self.state.step)
        # 3. Split into microbatches, compute the loss, update the weights.
        stats = await asyncio.to_thread(self._update, batch) if batch.sequences else None
        self._on_point("trained")
        self._unsaved += batch.group_ids
        self._count_step(updated=stats is not None)
        # 4. Log the step. If no checkpoint follows, a resumed run drops this line.
        times = {
            "rollouts_seconds": _rollout_seconds(groups),
            "waiting_seconds": leased - started,
            "training_seconds": time.perf_counter() - leased,
            **timer.lap(),
        }
        self._log_step(batch, stats, stale, times)
        last = self.state.step == config.steps
        # 5. Save a checkpoint, then acknowledge the groups that it contains.
        if last or self.state.step % config.checkpoint_every == 0:
            await self._save_checkpoint()
            await self._acknowledge_trained()
        # 6. Send the weights to the engine and check that they arrived.
        if last or self.state.step % config.sync_every == 0:
            await self._sync_weights()
        self._on_point("synced")
        # 7. Evaluate on held-out instances; publish the metrics.
        if last or (config.eval_every and self.state.step % config.eval_every == 0):
            await self._evaluate(timer)
        await self._metrics.publish()

    def _update(self, batch: TrainingBatch) -> StepStats:
        weights_after = None
        if self._config.recomputes_proximal:
            adapter = self._config.lora is not None
            weights_after = partial(checkpoint.weights_after, self._run, initial=self._model, adapter=adapter)
        return self._learner.update(batch, self.state.step, weights_after)

    # Groups

    async def _lease_groups(self) -> tuple[list[TrainingGroup], int]:
        """Return the groups of the next step, and the number of groups that were dropped as too stale.

        A step has `config.groups` groups, or fewer if no more can come because groups were dropped or cancelled. With
        `dynamic_sampling`, groups without a signal are returned too, but do not count towards `config.groups`. At most
        `MAX_EMPTY_ROUNDS` additional rounds are started.
        """
        config = self._config
        while self.state.rounds <= self.state.step + config.max_async_steps and self.state.rounds < config.steps:
            await self._start_round()
        groups: list[TrainingGroup] = []
        stale, empty_rounds = 0, 0
        deadline = time.monotonic() + config.wait_seconds
        while (missing := config.groups - sum(map(self._counts_towards_step, groups))) > 0:
            # Read before the feed, so that a group that finishes in between is found in the feed.
            pending = await self._rollouts.pending_groups()
            offer = await self._leases.take(
                self._run.name, missing, step=self.state.step, max_staleness=config.max_staleness
            )
            stale += len(offer.dropped)
            groups += await self._read_untrained(offer.leases)
            if offer.leases or offer.dropped:
                deadline = time.monotonic() + config.wait_seconds
            elif pending and time.monotonic() > deadline:
                raise TrainingError(
                    f"no group was finished for {config.wait_seconds:g} s, and {pending} are in progress: "
                    "look at them with `polar sessions`, or raise wait_seconds"
                )
            elif pending:
                await asyncio.sleep(POLL_SECONDS)
            elif groups and (not config.dynamic_sampling or empty_rounds == MAX_EMPTY_ROUNDS):
                break  # train a smaller step instead of no step
            elif empty_rounds == MAX_EMPTY_ROUNDS:
                raise TrainingError(
                    f"{MAX_EMPTY_ROUNDS} rounds of rollouts in a row ended without a group to train on ({stale} groups "
                    "were too stale, or of an unknown policy version): look at the rollouts with `polar sessions`"
                )
            else:
                empty_rounds += 1
                await self._start_round()
        return groups, stale

    def _counts_towards_step(self, group: TrainingGroup) -> bool:
        return not self._config.dynamic_sampling or has_signal(group, self._config)

    async def _read_untrained(self, leases: Sequence[GroupLease]) -> list[TrainingGroup]:
        """Read the leased groups that were not trained yet. Acknowledge the others, which the last checkpoint
        contains."""
        groups = []
        for lease in leases:
            if lease.group_id in self.state.trained:  # its acknowledgement was lost, or came too late
                await self._acknowledge(lease)
            elif lease.group_id not in self._unsaved:  # otherwise the next checkpoint acknowledges it
                groups.append(await self._reader.read_group(lease.group_id, self._config.builder, lease.staleness))
        return groups

    async def _start_round(self) -> None:
        await self._rollouts.start_round(self.state.rounds)
        self.state = replace(self.state, rounds=self.state.rounds + 1)

    async def _acknowledge_trained(self) -> None:
        """Acknowledge the leased groups that the last checkpoint contains."""
        for lease in self._leases:
            if lease.group_id in self.state.trained:
                await self._acknowledge(lease)
                self._on_point("acknowledged one")
        self._on_point("acknowledged")

    async def _acknowledge(self, lease: GroupLease) -> None:
        """Acknowledge a group and remove it from `state.trained`. If the acknowledgement fails, the group stays in
        `state.trained`, so that it is recognised when it is offered again."""
        if await self._leases.acknowledge(lease):
            trained = tuple(group for group in self.state.trained if group != lease.group_id)
            self.state = replace(self.state, trained=trained)

    # Checkpoints

    def _count_step(self, *, updated: bool) -> None:
        now, step = time.monotonic(), self.state.step + 1
        minutes = self.state.minutes + (now - self._last_step_ended) / 60
        updates = self.state.updates + updated
        self.state = replace(self.state, step=step, version=str(step), updates=updates, minutes=minutes)
        self._last_step_ended = now

    async def _save_checkpoint(self) -> None:
        started = time.perf_counter()
        self.state = replace(self.state, trained=(*self.state.trained, *self._unsaved))
        # In threads: gathering the weights of several processes takes long, and the gateway serves agents meanwhile.
        weights = await asyncio.to_thread(self._learner.weights)
        optimiser = await asyncio.to_thread(self._learner.state)
        keep = self._config.checkpoints_to_keep
        await asyncio.to_thread(
            checkpoint.save, self._run, self.state, weights, optimiser, model=self._model, keep=keep
        )
        self._unsaved = []
        self._metrics.write("checkpoint", self.state.step, {"seconds": time.perf_counter() - started})
        self._on_point("saved")

    def _resume(self) -> int:
        """Load the last checkpoint, if there is one. Return the number of steps that were made after this checkpoint
        and are lost."""
        config_file, folder = self._run / "config.json", checkpoint.latest(self._run)
        if folder is not None:
            if changed := changed_settings(orjson.loads(config_file.read_bytes()), self._config):
                changes = ", ".join(f"{name} was {then!r} and is {now!r}" for name, (then, now) in changed.items())
                raise UsageError(
                    f"The run {self._run} was started with other settings: {changes}. Restore them, or start a run "
                    "under another name."
                )
            loaded = checkpoint.load(folder)
            self._learner.restore(loaded.weights, loaded.optimiser)
            self.state = loaded.state
            self._report(f"resumed from {folder.name}")
        checkpoint.write_file(config_file, orjson.dumps(self._config.to_json(), option=orjson.OPT_INDENT_2))
        return drop_lines_after(self._run, self.state.step)

    @contextlib.contextmanager
    def _locked_run(self) -> Iterator[None]:
        """Hold the run's lock file, which the system releases however the process ends."""
        self._run.mkdir(parents=True, exist_ok=True)
        with (self._run / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"Another process is training in {self._run}.") from None
            yield

    # Weights

    async def _sync_weights(self) -> None:
        """Send the weights to the engine, with the step as their version, and prove with a probe that they arrived."""
        started = time.perf_counter()
        ids = probe_ids(self._learner.vocab_size)
        logprobs = await asyncio.to_thread(self._learner.logprobs, ids)
        version = str(self.state.step)
        await self._weight_sync.push(await asyncio.to_thread(self._learner.weights), version)
        tolerance = self._config.probe_tolerance
        result = await probe(self._engine, ids, logprobs, self._last_probe, tolerance, self._probe_noise)
        self._last_probe = logprobs
        self._probe_noise = result.mean if self._probe_noise is None else self._probe_noise
        engine_version = await self._engine.weight_version()
        if engine_version not in (None, version):
            raise TrainingError(
                f"after the sync to version {version} the engine reports version {engine_version}: another program "
                "also updates its weights, so it is unknown which weights sampled the tokens. Let only this run update "
                "the weights"
            )
        seconds = time.perf_counter() - started
        values = {"version": version, "engine": engine_version, "seconds": seconds, **asdict(result)}
        self._metrics.write("sync", self.state.step, values)

    # Metrics

    async def _evaluate(self, timer: StepTimer) -> None:
        if not self._config.eval_every:
            return
        started = time.perf_counter()
        with timer.paused():
            rewards = await self._rollouts.evaluate(self.state.step)
        values = reward_stats([reward for reward in rewards if reward is not None])
        self._metrics.write("eval", self.state.step, {**values, "seconds": time.perf_counter() - started})
        self._report(f"held-out reward after {self.state.step} steps: {values['reward']}")

    def _log_step(self, batch: TrainingBatch, stats: StepStats | None, stale: int, times: Json) -> None:
        lengths = [int(sequence.trained.sum()) for sequence in batch.sequences if sequence.trained.any()]
        plan, seconds = batch.plan, times["waiting_seconds"] + times["training_seconds"]
        values: Json = {
            **reward_stats(batch.rewards),
            "groups": list(batch.group_ids),
            "rollouts": len(plan.rollouts),
            "trained_rollouts": plan.trained_rollouts,
            "sampled_tokens": plan.sampled_tokens,
            "trained_tokens": plan.trained_tokens,
            "skipped": plan.skipped_json(),
            "dropped_stale": stale,
            "staleness": max(batch.staleness, default=None),
            "length_mean": sum(lengths) / len(lengths) if lengths else None,
            "length_max": max(lengths, default=None),
            "tokens_per_second": plan.sampled_tokens / seconds,
            "rollouts_per_second": len(plan.rollouts) / seconds,
            "updated": stats is not None,
            **({} if stats is None else asdict(stats)),
            **times,
        }
        self._metrics.write("step", self.state.step, values)
        self._report(f"step {self.state.step}: reward {values['reward']}, {plan.trained_tokens} tokens trained")


def _rollout_seconds(groups: Sequence[TrainingGroup]) -> float | None:
    """Return the time from the start of the first rollout to the end of the last one."""
    rollouts = [member.rollout for group in groups for member in group.members]
    started = [rollout.started_at for rollout in rollouts if rollout.started_at is not None]
    ended = [rollout.ended_at for rollout in rollouts if rollout.ended_at is not None]
    return max(ended) - min(started) if started and ended else None
