"""Read and check rows of `tokens-jsonl` for other trainers, in the same way for all their formats.

Promises:

* A position with mask 1 has a finite recorded log-probability. A row that lacks such a value is refused, never
  repaired.
* A token whose mask is 0 is context: formats that need a log-probability there get 0.0, which no loss reads.
* A rollout counts once in its group's baseline, however many traces it has.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

from polar_proxy.traces.grades import REJECTED
from polar_proxy.traces.rows import RowError, read_row
from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.types import Json, Trace


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One trace. The three lists of the response have the same length, m."""

    trace_id: str
    rollout_id: str | None
    group_id: str | None
    task_id: str | None
    session_id: str
    prompt_ids: tuple[int, ...]
    """Ids of the prompt, [p]; never empty."""
    response_ids: tuple[int, ...]
    """Ids of the response, [m]."""
    loss_mask: tuple[int, ...]
    """1 for each sampled token of the response, 0 for all other tokens of the response, [m]. At least one is 1."""
    logprobs: tuple[float, ...]
    """Log-probabilities of the response, in nats, as recorded at sampling, [m]; 0.0 where the mask is 0."""
    reward: float | None
    advantage: float | None
    """The advantage of the row's rollout; None until `with_advantages` has set it."""
    masked: bool
    """True if the row's rollout counts in the baseline but is not trained."""
    status: str | None
    versions: tuple[str, ...]
    """The policy versions that sampled the row's tokens, in order, each once; empty if the engine reported none."""
    temperature: float
    """Temperature of the log-probabilities, the same for all answers of the row. A trainer divides its logits by it."""
    changes: Json
    """Settings besides the temperature that changed the distribution of an answer, such as top_p; empty if none did."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    def trained_mask(self) -> list[int]:
        """Return the mask of the response tokens to train, [m]: `loss_mask`, or zeros if the rollout is masked."""
        return [0] * len(self.loss_mask) if self.masked else list(self.loss_mask)

    def runs(self) -> list[tuple[bool, int, int]]:
        """Split the response where the loss mask changes; return (sampled, start, end) for each part, in order."""
        found: list[tuple[bool, int, int]] = []
        start = 0
        for bit, run in groupby(self.loss_mask):
            end = start + len(list(run))
            found.append((bool(bit), start, end))
            start = end
        return found


def read_training_row(row: Json) -> TrainingRow:
    """Read a row of tokens-jsonl. Raise RowError for a row that no trainer can use."""
    trace = read_row(row)
    name = f"the row {trace.trace_id}"
    if trace.parent_trace_id is not None:
        raise RowError("branch", f"{name} is a branch of a tree: export with --builder merged or per_call")
    if trace.grade == REJECTED:
        raise RowError("rejected", f"an audit rejected the trace {trace.trace_id}")
    if not trace.loss_mask.any():
        raise RowError("nothing_sampled", f"{name} has no sampled token")
    if not trace.prompt_length:
        raise RowError("no_prompt", f"{name} has no prompt: nothing predicts its first token")
    start = trace.prompt_length
    mask = trace.loss_mask[start:].tolist()
    logprobs = trace.logprobs[start:].tolist()
    return TrainingRow(
        trace_id=trace.trace_id,
        rollout_id=trace.rollout_id,
        group_id=row.get("group_id"),
        task_id=row.get("task_id"),
        session_id=trace.session_id,
        prompt_ids=tuple(trace.token_ids[:start].tolist()),
        response_ids=tuple(trace.token_ids[start:].tolist()),
        loss_mask=tuple(mask),
        logprobs=tuple(value if bit else 0.0 for value, bit in zip(logprobs, mask, strict=True)),
        reward=trace.reward,
        advantage=row.get("advantage"),
        masked=bool(row.get("masked")) or bool(row.get("incomplete")),
        status=row.get("status"),
        versions=_policy_versions(trace),
        temperature=_temperature(trace),
        changes={name: value for sampling in trace.sampling for name, value in sampling.changes.items()},
    )


def read_training_rows(rows: Iterable[Json], left_out: Counter[str]) -> list[TrainingRow]:
    """Read the rows that a trainer can use, and count the others by reason. A refused trace does not affect the other
    traces of its rollout, as in Polar's own trainer."""
    found = []
    for row in rows:
        try:
            found.append(read_training_row(row))
        except RowError as error:
            left_out[error.reason] += 1
    return found


def _policy_versions(trace: Trace) -> tuple[str, ...]:
    runs = [run for sampling in trace.sampling for run in sampling.versions]
    return tuple(dict.fromkeys(str(version) for _, version in runs if version is not None))


def _temperature(trace: Trace) -> float:
    """Return the temperature of the log-probabilities. Raise RowError if the answers of the trace have different or
    unknown temperatures."""
    raw = trace.rescored
    found = {1.0 if raw or each.logprob_mode == "raw" else each.temperature for each in trace.sampling}
    if len(found) != 1 or (temperature := found.pop()) is None:
        raise RowError(
            "temperatures",
            f"the answers of the trace {trace.trace_id} were sampled at several or unknown temperatures: "
            "export with --builder per_call",
        )
    return float(temperature)


def require_temperature(row: TrainingRow, temperature: float) -> None:
    """Raise RowError unless the row was sampled at `temperature`, at which the trainer computes log-probabilities."""
    require_same_temperature(f"the row {row.trace_id}", row.temperature, temperature)


def require_same_temperature(name: str, sampled_at: float, temperature: float) -> None:
    if abs(sampled_at - temperature) > 1e-6:
        raise RowError(
            "temperature",
            f"{name} was sampled at temperature {sampled_at:g}, and the trainer computes "
            f"log-probabilities at {temperature:g}: its importance ratios would be wrong. Set its temperature to "
            f"{sampled_at:g}",
        )


# ---------------------------------------------------------------- groups and advantages


RewardsByGroup = Mapping[str, Mapping[str, float | None]]
"""Group id -> rollout id -> reward."""


def advantages_by_rollout(rewards: Mapping[str, float | None], name: str = "grpo") -> dict[str, float | None]:
    """Return the advantages of one group. `rewards`: rollout id -> reward. `name`: the function in `ADVANTAGES`.

    A rollout without a reward has the advantage None, and so has the pivot of `mc_grpo`: the rollout with the median
    reward that `mc_grpo` leaves out of training.
    """
    values = ADVANTAGES[name](list(rewards.values()))
    return {key: None if math.isnan(value) else value for key, value in zip(rewards, values.tolist(), strict=True)}


def with_advantages(rows: Iterable[Json], name: str = "grpo", rewards: RewardsByGroup | None = None) -> list[Json]:
    """Return the rows with the field `advantage`. A rollout counts once in its group, even if it has several rows.

    `rewards`: the rewards of all rollouts of each group. So rollouts without a trace count in the baseline, too. In a
    group that `rewards` does not contain, only the rollouts that have rows count.
    """
    rows = list(rows)
    groups: dict[str, dict[str, float | None]] = {}
    for row in rows:
        if row.get("group_id") is not None:
            groups.setdefault(row["group_id"], {})[row["rollout_id"]] = row.get("reward")
    found = {
        group: advantages_by_rollout((rewards or {}).get(group, members), name) for group, members in groups.items()
    }
    return [
        row | {"advantage": found.get(row.get("group_id") or "", {}).get(row.get("rollout_id") or "")} for row in rows
    ]


def group_by_rollout(rows: Sequence[TrainingRow]) -> dict[str, list[TrainingRow]]:
    """Return rollout id -> rows of this rollout, in their order. Raise RowError if a row has no group, or if the rows
    do not all have the same group."""
    found: dict[str, list[TrainingRow]] = {}
    for row in rows:
        group_id, rollout_id = require_group(row)
        if group_id != rows[0].group_id:
            raise RowError("malformed", f"rows of two groups: {rows[0].group_id} and {group_id}")
        found.setdefault(rollout_id, []).append(row)
    return found


def groups_of(rows: Iterable[Json]) -> list[list[Json]]:
    """Return the rows group by group, in order of first appearance. Rows without a group are left out."""
    found: dict[str, list[Json]] = {}
    for row in rows:
        if row.get("group_id") is not None:
            found.setdefault(row["group_id"], []).append(row)
    return list(found.values())


def _numbers() -> dict[str, int]:
    return defaultdict(count().__next__)


@dataclass(frozen=True, slots=True)
class IdNumbers:
    """Numbers for the ids of one data set, from 0 on in order of first appearance."""

    groups: dict[str, int] = field(default_factory=_numbers)
    rollouts: dict[str, int] = field(default_factory=_numbers)
    traces: dict[str, int] = field(default_factory=_numbers)


# ---------------------------------------------------------------- requirements of records


def require_group(row: TrainingRow) -> tuple[str, str]:
    """Return (group_id, rollout_id). Raise RowError for a row that does not come from a rollout."""
    if row.group_id is None or row.rollout_id is None:
        raise RowError("no_group", f"the row {row.trace_id} belongs to no group: it does not come from a rollout")
    return row.group_id, row.rollout_id


def require_reward(row: TrainingRow) -> float:
    """Return the reward. Raise RowError if the rollout was not scored: a missing reward is not 0."""
    if row.reward is None:
        raise RowError("no_reward", f"the rollout of the row {row.trace_id} has no reward, and the record needs one")
    return float(row.reward)


def require_advantage(row: TrainingRow) -> float:
    """Return the advantage. Raise RowError if the rollout is not trained, or has no advantage in its group."""
    if row.masked:
        raise RowError(
            "masked", f"the rollout of the row {row.trace_id} is masked: it counts in the baseline, but is not trained"
        )
    if row.advantage is None or not math.isfinite(row.advantage):
        raise RowError("no_advantage", f"the row {row.trace_id} has no advantage: see `with_advantages`")
    return float(row.advantage)
