"""Training batches: make the training sequences of one step from finished groups. Pure functions on values.

Promises:

* A rollout counts once in its group's baseline, however many traces it has. All traces of a rollout get the rollout's
  advantage.
* The sampled tokens of a trace are trained only if the trace's grade is in `TRAINABLE` (traces/grades.py). If a trace
  is skipped, the other traces of its rollout are still trained. Each sampled token is trained at most once.
* The sampled tokens of a rollout that is masked (timed out) or incomplete are skipped; its reward counts in the
  baseline.
* With ECHO (`echo_coef`, a loss on observed tokens), observed tokens are trained even if the sampled ones are skipped,
  except in traces that are too long or rejected.
* Everything that is skipped is counted by reason. The trained and the skipped sampled tokens add up to all sampled
  tokens.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from polar_proxy.api_models import Rollout
from polar_proxy.errors import TrainingError
from polar_proxy.sequences import trace_path
from polar_proxy.store import RolloutRow
from polar_proxy.store.repositories.traces import TraceSummary
from polar_proxy.traces.grades import REJECTED, TRAINABLE
from polar_proxy.training.advantages import ADVANTAGES, Floats, focal_weight, variance_weight
from polar_proxy.training.config import GrpoConfig
from polar_proxy.types import Json, Trace

RolloutOutcome = RolloutRow | Rollout
"""A finished rollout: a row of the store, or the API's answer."""


@dataclass(frozen=True, slots=True)
class GroupRollout:
    """A rollout of a group, with all its traces."""

    rollout: RolloutOutcome
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """Rollouts of one task, which are compared with each other."""

    group_id: str
    task_id: str
    members: tuple[GroupRollout, ...]
    staleness: int | None = None
    """The trainer's policy version minus the lowest version of the group's finished rollouts, according to the group's
    lease; None if unknown."""

    @property
    def rewards(self) -> list[float | None]:
        return [member.rollout.reward for member in self.members]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A trace with its whole prefix: n tokens from the root to the last sampled one."""

    trace_id: str
    group_id: str
    rollout: int
    """Index of the rollout within the batch."""
    token_ids: npt.NDArray[np.int64]
    """[n]"""
    trained: npt.NDArray[np.bool_]
    """[n]: True if the token was sampled and is trained in this sequence. A sampled token may instead be trained in
    another sequence, or be skipped."""
    old_logprobs: npt.NDArray[np.float64]
    """[n], nats, as recorded at sampling; NaN where `trained` is False."""
    advantage: float
    observed: npt.NDArray[np.bool_]
    """[n]: whether the token comes after a sampled token and was not sampled (tool output and the template around it).
    False for the tokens of the prefix."""
    temperatures: npt.NDArray[np.float64]
    """[n]: temperature at which a trained token was sampled; 1 where `trained` is False."""
    versions: npt.NDArray[np.object_]
    """[n]: policy version that sampled a trained token; None where it is unknown, and where `trained` is False."""
    group_size: int
    """Number of rollouts in the sequence's group, trained or not."""


@dataclass(slots=True)
class SkippedCounts:
    """Counts of rollouts, traces and tokens that were not trained, for one reason."""

    rollouts: int = 0
    traces: int = 0
    tokens: int = 0
    """Number of sampled tokens."""


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """The decision about one rollout of a batch."""

    rollout_id: str
    advantage: float
    skip_reason: str | None
    """Why the rollout is skipped as a whole, with all its traces; None if it is not."""
    trace_skip_reasons: tuple[str | None, ...]
    """For each trace, why its sampled tokens are not trained; None if they are trained."""
    trace_tokens: tuple[int, ...]
    """For each trace, the number of its sampled tokens."""

    @property
    def sampled_tokens(self) -> int:
        return sum(self.trace_tokens)

    @property
    def trained_tokens(self) -> int:
        traces = zip(self.trace_tokens, self.trace_skip_reasons, strict=True)
        return sum(tokens for tokens, skip_reason in traces if skip_reason is None)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The decisions about all rollouts of a batch."""

    rollouts: tuple[PlannedRollout, ...]

    @property
    def skipped(self) -> dict[str, SkippedCounts]:
        """Counts of skipped data by reason."""
        counts: defaultdict[str, SkippedCounts] = defaultdict(SkippedCounts)
        for rollout in self.rollouts:
            if rollout.skip_reason is not None:
                counts[rollout.skip_reason].rollouts += 1
            for reason, tokens in zip(rollout.trace_skip_reasons, rollout.trace_tokens, strict=True):
                if reason is not None:
                    counts[reason].traces += 1
                    counts[reason].tokens += tokens
        return dict(counts)

    @property
    def sampled_tokens(self) -> int:
        return sum(rollout.sampled_tokens for rollout in self.rollouts)

    @property
    def trained_tokens(self) -> int:
        return sum(rollout.trained_tokens for rollout in self.rollouts)

    @property
    def trained_rollouts(self) -> int:
        return sum(rollout.trained_tokens > 0 for rollout in self.rollouts)

    def skipped_json(self) -> Json:
        return {reason: asdict(counts) for reason, counts in sorted(self.skipped.items())}


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The training data of one step."""

    sequences: tuple[TrainingSequence, ...]
    group_ids: tuple[str, ...]
    rewards: tuple[float, ...]
    """Rewards of all rollouts that have one."""
    plan: BatchPlan
    staleness: tuple[int, ...] = ()

    def minibatches(self, count: int, seed: str) -> list[list[TrainingSequence]]:
        """Shuffle the groups with `seed`, and split the sequences into `count` parts of whole groups.

        If there are fewer groups than `count`, each group is a part.
        """
        groups: dict[str, list[TrainingSequence]] = {}
        for sequence in self.sequences:
            groups.setdefault(sequence.group_id, []).append(sequence)
        names = list(groups)
        if count > 1:
            random.Random(seed).shuffle(names)
        parts = min(count, len(names))
        return [[sequence for name in names[part::parts] for sequence in groups[name]] for part in range(parts)]


def make_batch(groups: Sequence[TrainingGroup], config: GrpoConfig, step: int = 0) -> TrainingBatch:
    """Compute advantages and collect the sequences to train, as `plan_batch` decides.

    Raises TrainingError if a token would be trained twice, because the traces are wrong then.
    """
    members = [(group, member) for group in groups for member in group.members]
    plan = plan_batch([[(one.rollout, one.traces) for one in group.members] for group in groups], config, step)
    sequences: list[TrainingSequence] = []
    for index, ((group, member), planned) in enumerate(zip(members, plan.rollouts, strict=True)):
        sequences += _make_sequences(group, member, index, planned, config)
    return TrainingBatch(
        sequences=tuple(one for one in sequences if one.trained.any() or one.observed.any()),
        group_ids=tuple(group.group_id for group in groups),
        rewards=tuple(float(member.rollout.reward) for _, member in members if member.rollout.reward is not None),
        plan=plan,
        staleness=tuple(group.staleness for group in groups if group.staleness is not None),
    )


def plan_batch(
    groups: Sequence[Sequence[tuple[RolloutOutcome, Sequence[Trace | TraceSummary]]]], config: GrpoConfig, step: int = 0
) -> BatchPlan:
    """Compute advantages, and decide which rollouts and traces are trained.

    `groups`: for each group, its rollouts with their traces. The plan needs no tokens, so summaries of the stored
    traces are enough. With `config.shuffle_rewards`, the seed of the shuffle is made from `config.seed` and `step`.
    """
    rewards: list[list[float | None]] = [[rollout.reward for rollout, _ in group] for group in groups]
    if config.shuffle_rewards:
        rewards = _shuffle_rewards(rewards, f"{config.seed}/{step}")
    planned: list[PlannedRollout] = []
    for group, group_rewards in zip(groups, rewards, strict=True):
        advantages = group_advantages(group_rewards, config)
        group_reason = None if config.keep_zero_variance_groups or _any_signal(advantages) else "no_spread"
        for (rollout, traces), advantage in zip(group, advantages.tolist(), strict=True):
            reason = _skip_rollout(rollout, advantage, traces) or group_reason
            trace_reasons = tuple(reason or _skip_trace(trace, config) for trace in traces)
            trace_tokens = tuple(trace.trained_tokens for trace in traces)
            planned.append(PlannedRollout(rollout.rollout_id, advantage, reason, trace_reasons, trace_tokens))
    return BatchPlan(tuple(planned))


def group_advantages(rewards: Sequence[float | None], config: GrpoConfig) -> Floats:
    """Return advantages times the weight of the group, float64 [n]; NaN for rollouts that are not to be trained."""
    advantages = ADVANTAGES[config.advantage](rewards)
    if config.group_weight == "focal":
        return advantages * focal_weight(rewards)
    return advantages * variance_weight(rewards) if config.group_weight == "variance" else advantages


def has_signal(group: TrainingGroup, config: GrpoConfig) -> bool:
    """Return whether the group has an advantage that is not 0."""
    return _any_signal(group_advantages(group.rewards, config))


def _any_signal(advantages: Floats) -> bool:
    return bool(np.any(np.nan_to_num(advantages) != 0.0))


def _shuffle_rewards(rewards: Sequence[Sequence[float | None]], seed: str) -> list[list[float | None]]:
    """Shuffle rewards among all rollouts of all groups. If they stayed within their group, they would still show
    which tasks the policy can solve. Rollouts without a reward stay without one."""
    known = [reward for group in rewards for reward in group if reward is not None]
    random.Random(seed).shuffle(known)
    shuffled = iter(known)
    return [[None if reward is None else next(shuffled) for reward in group] for group in rewards]


def _skip_rollout(row: RolloutOutcome, advantage: float, traces: Sequence[object]) -> str | None:
    """Return why a rollout is skipped as a whole, or None."""
    if row.incomplete:
        return "incomplete"
    if row.masked:
        return "masked"
    if row.status == "cancelled" or (row.status == "failed" and row.reward is None):
        return row.status
    if row.reward is None:  # a failed rollout with a reward is trained: the policy made it fail
        return "no_reward"
    if np.isnan(advantage):
        return "no_advantage"
    return None if traces else "no_traces"


def _make_sequences(
    group: TrainingGroup, member: GroupRollout, rollout_index: int, planned: PlannedRollout, config: GrpoConfig
) -> Iterator[TrainingSequence]:
    """Yield a sequence for each trained trace of a rollout.

    With ECHO (`echo_coef`), a skipped trace gives a sequence too, unless it is too long or rejected. Of this sequence
    only the environment's tokens are trained, not the sampled ones.
    """
    seen: set[tuple[str, int, int]] = set()
    by_id = {trace.trace_id: trace for trace in member.traces}
    for trace, skip_reason in zip(member.traces, planned.trace_skip_reasons, strict=True):
        for_echo = config.echo_coef > 0 and trace.grade != REJECTED and not _is_too_long(trace, config)
        if skip_reason is not None and not for_echo:
            continue
        _check_sampled_once(trace, seen)
        whole = trace_path(trace, by_id)
        trained = whole.loss_mask.astype(bool)
        observed = ~trained & (np.cumsum(trained) > 0)
        # The prefix is trained with the trace that it belongs to.
        trained[: trace.branch_at] = observed[: trace.branch_at] = False
        if skip_reason is not None:
            trained[:] = False
        temperatures, versions = _sampling_of_tokens(trace, len(trained))
        temperatures[~trained], versions[~trained] = 1.0, None
        yield TrainingSequence(
            trace_id=trace.trace_id,
            group_id=group.group_id,
            rollout=rollout_index,
            token_ids=whole.token_ids.astype(np.int64),
            trained=trained,
            old_logprobs=np.where(trained, whole.logprobs.astype(np.float64), np.nan),
            advantage=planned.advantage if skip_reason is None else 0.0,
            observed=observed,
            temperatures=temperatures,
            versions=versions,
            group_size=len(group.members),
        )


def _check_sampled_once(trace: Trace, seen: set[tuple[str, int, int]]) -> None:
    """Add the trace's sampled tokens (call, choice, position) to `seen`. Raises TrainingError for a repeated token."""
    for span in trace.spans:
        if span.kind != "sampled":
            continue
        for position in range(span.start, span.end):
            if (sample := (span.call_id, span.choice, position)) in seen:
                raise TrainingError(f"token {position} of call {span.call_id} is marked as sampled in two traces")
            seen.add(sample)


def _sampling_of_tokens(trace: Trace, length: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.object_]]:
    """Return the temperature and the policy version at which each token of a trace's path was sampled. The values are 1
    and None for tokens that were not sampled, and for tokens before the trace's branch."""
    temperatures = np.ones(length)
    versions = np.full(length, None, dtype=object)
    samplings = iter(trace.sampling)
    position = trace.branch_at
    for span in trace.spans:
        end = position + span.end - span.start
        if span.kind == "sampled" and (sampling := next(samplings, None)) is not None:
            temperatures[position:end] = sampling.temperature or 1.0
            for first, version in sampling.versions:
                versions[position + first : end] = version
        position = end
    return temperatures, versions


def _skip_trace(trace: Trace | TraceSummary, config: GrpoConfig) -> str | None:
    """Return why a trace of a trained rollout is skipped; None if the trace is trained."""
    if trace.grade not in TRAINABLE:
        return f"grade_{trace.grade}"
    if not trace.trained_tokens:
        return "nothing_sampled"
    if _is_too_long(trace, config):
        return "too_long"
    if isinstance(trace, TraceSummary):
        return None  # the store refuses traces with any of the faults below
    if not np.isfinite(trace.logprobs[trace.loss_mask == 1]).all():
        return "no_logprobs"
    if len(trace.sampling) != sum(span.kind == "sampled" for span in trace.spans):
        return "no_temperature"
    return None


def _is_too_long(trace: Trace | TraceSummary, config: GrpoConfig) -> bool:
    own_length = trace.length if isinstance(trace, TraceSummary) else len(trace.token_ids)
    return trace.branch_at + own_length > config.max_sequence_length
