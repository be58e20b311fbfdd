"""From finished groups to the sequences of one step: pure. Where groups come from: `reading`.

Promises:

* A rollout counts once in its group's baseline, whatever its traces are; its traces all have its advantage.
* Only traces graded exact or continued are trained, only those of rollouts with everything recorded, and each sampled
  token once.
* A rollout that is masked (out of time) or incomplete is not trained, and its reward stays in the baseline.
* What was left out is counted by reason: sampled tokens that are trained and those that are left out add up to all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from polar_proxy.sequences import trace_path
from polar_proxy.traces.grades import TRAINABLE
from polar_proxy.training import advantages
from polar_proxy.training.algorithms import ADVANTAGES
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.failures import TrainingError
from polar_proxy.training.tree import BoolArray, IntArray
from polar_proxy.types import Json, Trace


class RolloutOutcome(Protocol):
    """What became of a rollout, as far as training asks: a row of the store, or the API's answer."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def incomplete(self) -> bool: ...
    @property
    def masked(self) -> bool: ...
    @property
    def started_at(self) -> float | None: ...
    @property
    def ended_at(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class GroupRollout:
    """A rollout of a group and all its traces."""

    rollout: RolloutOutcome
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The rollouts of one task that are compared."""

    group_id: str
    task_id: str
    members: tuple[GroupRollout, ...]
    staleness: int | None = None
    """Policy versions behind, as the lease said."""

    @property
    def rewards(self) -> list[float | None]:
        return [member.rollout.reward for member in self.members]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A whole sequence of n tokens, from its root."""

    trace_id: str
    group_id: str
    rollout: int
    """Number of its rollout within the batch."""
    token_ids: IntArray
    """[n]"""
    trained: BoolArray
    """bool [n]: sampled, and this sequence's to train."""
    recorded: npt.NDArray[np.float64]
    """[n], nats, as recorded at sampling; NaN off `trained`."""
    advantage: float
    observed: BoolArray
    """bool [n]: stands behind something sampled and was not: what the environment answered, with its template around
    it; this sequence's own."""


@dataclass(slots=True)
class SkippedCounts:
    """What was left out for one reason."""

    rollouts: int = 0
    traces: int = 0
    tokens: int = 0
    """Sampled ones."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What one step trains on."""

    sequences: tuple[TrainingSequence, ...]
    group_ids: tuple[str, ...]
    rewards: tuple[float, ...]
    """Of all rollouts of all groups that have one."""
    rollouts: int
    """All of them, trained or not."""
    sampled_tokens: int
    """In all traces, trained or not."""
    staleness: tuple[int, ...] = ()
    left_out: Mapping[str, SkippedCounts] = field(default_factory=dict)
    """By reason."""

    @property
    def trained_tokens(self) -> int:
        return sum(int(sequence.trained.sum()) for sequence in self.sequences)

    @property
    def trained_rollouts(self) -> int:
        return len({sequence.rollout for sequence in self.sequences})

    def minibatches(self, count: int, seed: str) -> list[list[TrainingSequence]]:
        """Parts of whole groups, dealt in an order drawn by `seed`; fewer where there are fewer groups."""
        groups: dict[str, list[TrainingSequence]] = {}
        for sequence in self.sequences:
            groups.setdefault(sequence.group_id, []).append(sequence)
        names = list(groups)
        if count > 1:
            random.Random(seed).shuffle(names)
        parts = min(count, len(names))
        return [[one for name in names[at::parts] for one in groups[name]] for at in range(parts)]

    def left_out_json(self) -> Json:
        return {
            reason: {"rollouts": left.rollouts, "traces": left.traces, "tokens": left.tokens}
            for reason, left in sorted(self.left_out.items())
        }


def make_batch(groups: Sequence[TrainingGroup], config: GrpoConfig) -> TrainingBatch:
    """The sequences of these groups with their advantages. Raises TrainingError for a token that would be trained
    twice: the builder broke its promise."""
    sequences: list[TrainingSequence] = []
    left_out: dict[str, SkippedCounts] = {}
    number = 0
    rewards = [group.rewards for group in groups]
    if config.shuffle_rewards:
        rewards = _dealt_anew(rewards, f"{config.seed}/{' '.join(group.group_id for group in groups)}")
    for group, known in zip(groups, rewards, strict=True):
        values = group_advantages(known, config)
        flat = _flat(values)
        for member, advantage in zip(group.members, values.tolist(), strict=True):
            reason = _masked(member, advantage)
            if reason is None and flat and not config.keep_zero_variance_groups:
                reason = "no_spread"
            if reason is not None:
                _leave_out(left_out, reason, member.traces, rollouts=1)
            else:
                sequences += _sequences(group.group_id, member, number, advantage, config, left_out)
            number += 1
    members = [member for group in groups for member in group.members]
    return TrainingBatch(
        sequences=tuple(sequences),
        group_ids=tuple(group.group_id for group in groups),
        rewards=tuple(float(one.rollout.reward) for one in members if one.rollout.reward is not None),
        rollouts=len(members),
        sampled_tokens=sum(int(trace.loss_mask.sum()) for member in members for trace in member.traces),
        staleness=tuple(group.staleness for group in groups if group.staleness is not None),
        left_out=left_out,
    )


def has_signal(group: TrainingGroup, config: GrpoConfig) -> bool:
    """Whether anything of a group is worth training: some advantage is not 0."""
    return not _flat(group_advantages(group.rewards, config))


def _flat(values: advantages.Floats) -> bool:
    return not np.any(np.nan_to_num(values) != 0.0)


def group_advantages(rewards: Sequence[float | None], config: GrpoConfig) -> advantages.Floats:
    """float64 [n]: by the chosen function, times the chosen weight of the group; NaN where there is no reward."""
    values = ADVANTAGES[config.advantage](rewards)
    if config.group_weight == "focal":
        return values * advantages.focal_weight(rewards)
    return values * advantages.variance_weight(rewards) if config.group_weight == "variance" else values


def _dealt_anew(rewards: Sequence[Sequence[float | None]], seed: str) -> list[list[float | None]]:
    """The same rewards at other rollouts, of any group: within its group a reward would still tell which task the
    policy can do. Who has none keeps none."""
    known = [reward for group in rewards for reward in group if reward is not None]
    random.Random(seed).shuffle(known)
    dealt = iter(known)
    return [[None if reward is None else next(dealt) for reward in group] for group in rewards]


def _masked(member: GroupRollout, advantage: float) -> str | None:
    """Why nothing of a rollout is trained; None where it is."""
    row = member.rollout
    if row.incomplete:
        return "incomplete"
    if row.masked:
        return "masked"
    if row.status == "cancelled" or (row.status == "failed" and row.reward is None):
        return row.status
    if row.reward is None:  # an agent that failed and was scored is trained: that is what it did
        return "no_reward"
    if np.isnan(advantage):
        return "no_advantage"
    return None if member.traces else "no_traces"


def _sequences(
    group_id: str,
    member: GroupRollout,
    number: int,
    advantage: float,
    config: GrpoConfig,
    left_out: dict[str, SkippedCounts],
) -> list[TrainingSequence]:
    found: list[TrainingSequence] = []
    seen: set[tuple[str, int, int]] = set()
    by_id = {trace.trace_id: trace for trace in member.traces}
    for trace in member.traces:
        if (reason := _refused(trace, config)) is not None:
            _leave_out(left_out, reason, (trace,))
            continue
        for span in trace.spans:
            for position in range(span.start, span.end) if span.kind == "sampled" else ():
                if (sample := (span.call_id, span.choice, position)) in seen:
                    raise TrainingError(f"token {position} of the call {span.call_id} stands in two traces as sampled")
                seen.add(sample)
        whole = trace_path(trace, by_id)
        trained = whole.loss_mask.astype(bool)
        observed = ~trained & (np.cumsum(trained) > 0)
        trained[: whole.own] = observed[: whole.own] = False  # those belong to the traces before
        found.append(
            TrainingSequence(
                trace_id=trace.trace_id,
                group_id=group_id,
                rollout=number,
                token_ids=whole.token_ids.astype(np.int64),
                trained=trained,
                recorded=np.where(trained, whole.logprobs.astype(np.float64), np.nan),
                advantage=advantage,
                observed=observed,
            )
        )
    return found


def _refused(trace: Trace, config: GrpoConfig) -> str | None:
    if trace.grade not in TRAINABLE:
        return f"grade_{trace.grade}"
    if not trace.loss_mask.any():
        return "nothing_sampled"
    if trace.branch_at + len(trace.token_ids) > config.max_sequence:
        return "too_long"
    if not np.isfinite(trace.logprobs[trace.loss_mask == 1]).all():
        return "no_logprobs"
    return None


def _leave_out(left_out: dict[str, SkippedCounts], reason: str, traces: Sequence[Trace], rollouts: int = 0) -> None:
    left = left_out.setdefault(reason, SkippedCounts())
    left.rollouts += rollouts
    left.traces += len(traces)
    left.tokens += sum(int(trace.loss_mask.sum()) for trace in traces)
