"""What every bridge reads: the rows of `polar export --format tokens-jsonl` (and of the HTTP feed), checked once.

Promises:

* A position with mask 1 carries a finite recorded log-probability; a row that breaks this is refused, never mended.
* Whatever stands where the mask is 0 is context: the formats that want a number there get 0.0, which no loss reads.
* A rollout counts once in its group's baseline, however many traces it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from polar_proxy.errors import PolarError
from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.types import Json, Trace

if TYPE_CHECKING:
    from polar_proxy.training.batch import TrainingGroup  # PyTorch comes with it, which an export does without

SCHEMA = 1
"""The newest row format that is understood (`export/rows.py`)."""


class UnsupportedRowError(PolarError):
    """A row that a trainer's record cannot hold. `reason` is one of `REFUSAL_REASONS`, for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


REFUSAL_REASONS = {
    "newer_schema": "written by a newer Polar",
    "malformed": "lengths or values that do not fit together",
    "branch": "a branch of builder `tree`, which is nothing without its parent",
    "refused": "an audit found other log-probabilities",
    "nothing_sampled": "nothing to train on",
    "no_prompt": "a sampled token with nothing before it to predict it from",
    "no_reward": "the rollout was not scored",
    "no_advantage": "the rollout's group gives it none",
    "no_group": "the rollout belongs to no group",
    "masked": "the rollout counts in the baseline only, and the record has no place for that",
    "several_traces": "the rollout has several sequences, and the record holds one",
    "shorter_sequence": "of a rollout of several sequences the longest is trained, and this is another",
    "group_size": "another number of rollouts than the trainer expects",
    "no_spread": "the group's rewards are all alike",
}


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One trace. The four lists of the response have one length, m."""

    trace_id: str
    rollout_id: str | None
    group_id: str | None
    task_id: str | None
    session_id: str
    prompt_ids: tuple[int, ...]
    """[p], never empty."""
    response_ids: tuple[int, ...]
    """[m]"""
    loss_mask: tuple[int, ...]
    """[m], 1 where sampled, with at least one 1."""
    logprobs: tuple[float, ...]
    """[m], nats, as recorded at sampling; 0.0 where the mask is 0."""
    reward: float | None
    advantage: float | None
    """Of its rollout, where `with_advantages` has been."""
    masked: bool
    """Its rollout counts in the baseline and is not trained."""
    status: str | None
    versions: tuple[str, ...]
    """Policy versions that sampled it, in order, each once; empty where the engine told none."""
    spans: tuple[Json, ...]
    """Where each run of tokens of prompt and response came from, in order: kind, call_id, choice, start, end."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    def trained_mask(self) -> list[int]:
        """[m]: `loss_mask`, or zeros where the rollout is masked."""
        return [0] * len(self.loss_mask) if self.masked else list(self.loss_mask)

    def runs(self) -> list[tuple[bool, int, int]]:
        """Runs of the response with one mask: (sampled, start, end), in order."""
        found: list[tuple[bool, int, int]] = []
        for place, bit in enumerate(self.loss_mask):
            if found and found[-1][0] == bool(bit):
                found[-1] = (bool(bit), found[-1][1], place + 1)
            else:
                found.append((bool(bit), place, place + 1))
        return found


def read_row(row: Json) -> TrainingRow:
    """Check a row of tokens-jsonl. Raises BridgeError."""
    name = str(row.get("trace_id"))
    if not isinstance(schema := row.get("schema"), int) or schema > SCHEMA:
        raise UnsupportedRowError(
            "newer_schema", f"the row {name} has schema {schema!r}; this Polar reads up to {SCHEMA}"
        )
    if row.get("parent_trace_id") is not None:
        raise UnsupportedRowError(
            "branch", f"the row {name} is a branch of a tree: export with --builder merged or per_call"
        )
    if row.get("grade") == "refused":
        raise UnsupportedRowError("refused", f"an audit refused the trace {name}")
    try:
        prompt, response = tuple(map(int, row["prompt_ids"])), tuple(map(int, row["response_ids"]))
        mask, values = tuple(map(int, row["loss_mask"])), row["logprobs"]
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedRowError("malformed", f"the row {name} is no row of tokens-jsonl: {error!r}") from error
    if not len(response) == len(mask) == len(values) or not set(mask) <= {0, 1}:
        lengths = f"{len(response)} ids, {len(mask)} mask bits, {len(values)} log-probabilities"
        raise UnsupportedRowError("malformed", f"the row {name} does not fit together: {lengths}")
    if not any(mask):
        raise UnsupportedRowError("nothing_sampled", f"nothing of the row {name} was sampled")
    if not prompt:
        raise UnsupportedRowError("no_prompt", f"the row {name} has no prompt: its first token has no prediction")
    for value, bit in zip(values, mask, strict=True):
        if bit and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise UnsupportedRowError("malformed", f"the row {name} trains a token whose log-probability is {value!r}")
    return TrainingRow(
        trace_id=name,
        rollout_id=row.get("rollout_id"),
        group_id=row.get("group_id"),
        task_id=row.get("task_id"),
        session_id=str(row.get("session_id")),
        prompt_ids=prompt,
        response_ids=response,
        loss_mask=mask,
        logprobs=tuple(float(value) if bit else 0.0 for value, bit in zip(values, mask, strict=True)),
        reward=row.get("reward"),
        advantage=row.get("advantage"),
        masked=bool(row.get("masked")) or bool(row.get("incomplete")),
        status=row.get("status"),
        versions=_versions(row.get("certificate")),
        spans=tuple(row.get("spans") or ()),
    )


def _versions(certificate: Json | None) -> tuple[str, ...]:
    """Of the sampled spans: each of their `versions` is a list of (first position, version)."""
    runs = [run for span in (certificate or {}).get("spans", ()) for run in span.get("versions", ())]
    return tuple(dict.fromkeys(str(version) for _, version in runs if version is not None))


def rows_of_group(group: TrainingGroup) -> list[Json]:
    """A finished group from the store, in the form of tokens-jsonl rows (without certificates)."""
    return [
        {
            "schema": SCHEMA,
            "rollout_id": member.rollout.rollout_id,
            "group_id": group.group_id,
            "task_id": group.task_id,
            "status": member.rollout.status,
            "masked": member.rollout.masked,
            "incomplete": member.rollout.incomplete,
            "reward": member.rollout.reward,
            **_of_trace(trace),
        }
        for member in group.members
        for trace in member.traces
    ]


def _of_trace(trace: Trace) -> Json:
    start = trace.prompt_length
    mask = trace.loss_mask[start:].tolist()
    values = trace.logprobs[start:].tolist()
    return {
        "trace_id": trace.trace_id,
        "session_id": trace.session_id,
        "grade": trace.grade,
        "parent_trace_id": trace.parent_trace_id,
        "prompt_ids": trace.token_ids[:start].tolist(),
        "response_ids": trace.token_ids[start:].tolist(),
        "loss_mask": mask,
        "logprobs": [value if bit else None for value, bit in zip(values, mask, strict=True)],
    }


def group_advantages(rewards: Mapping[str, float | None], name: str = "grpo") -> dict[str, float | None]:
    """Advantages of one group's rollouts by id, by the function of that name (docs/algorithms.md); None where a
    rollout has no reward, or is the pivot."""
    values = ADVANTAGES[name](list(rewards.values()))
    return {key: None if math.isnan(value) else value for key, value in zip(rewards, values.tolist(), strict=True)}


def with_advantages(
    rows: Iterable[Json], name: str = "grpo", rewards: Mapping[str, Mapping[str, float | None]] | None = None
) -> list[Json]:
    """The rows with `advantage`, each rollout counted once in its group.

    `rewards`: group_id -> rollout_id -> reward, of *all* rollouts of those groups; rollouts without a trace (a call was
    lost) are in the baseline too. Default: what the rows say, which knows only rollouts that have rows.
    """
    rows = list(rows)
    known: dict[str, dict[str, float | None]] = {key: dict(value) for key, value in (rewards or {}).items()}
    for row in rows:
        if row.get("group_id") is not None and row["group_id"] not in (rewards or {}):
            known.setdefault(row["group_id"], {})[row["rollout_id"]] = row.get("reward")
    found = {group: group_advantages(members, name) for group, members in known.items()}
    return [
        row | {"advantage": found.get(str(row.get("group_id")), {}).get(str(row.get("rollout_id")))} for row in rows
    ]


def group_by_rollout(rows: Sequence[TrainingRow]) -> dict[str, list[TrainingRow]]:
    """Rows of one group by rollout, in their order. Raises BridgeError where a row has no group, or another one."""
    found: dict[str, list[TrainingRow]] = {}
    for row in rows:
        if row.group_id is None or row.rollout_id is None:
            raise UnsupportedRowError(
                "no_group", f"the row {row.trace_id} belongs to no group: it was not rolled out by Polar"
            )
        if row.group_id != rows[0].group_id:
            raise UnsupportedRowError("malformed", f"rows of two groups: {rows[0].group_id} and {row.group_id}")
        found.setdefault(row.rollout_id, []).append(row)
    return found


def read_jsonl(path: Path | str) -> Iterator[Json]:
    """The rows of a file that `polar export --format tokens-jsonl --out PATH` wrote."""
    with Path(path).open("rb") as lines:
        for line in lines:
            yield orjson.loads(line)


def groups_of(rows: Iterable[Json]) -> list[list[Json]]:
    """Rows group by group, in the order of their first coming; a group's rows need not stand together. Rows of no group
    are left out."""
    found: dict[str, list[Json]] = {}
    for row in rows:
        if row.get("group_id") is not None:
            found.setdefault(row["group_id"], []).append(row)
    return list(found.values())


class IdNumbers:
    """Whole numbers for ids, from 0 on in the order of their first coming: some records have no place for text."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._known.setdefault(name, len(self._known))


def require_reward(row: TrainingRow) -> float:
    """Raises BridgeError where the rollout was not scored: no reward is not reward 0."""
    if row.reward is None:
        raise UnsupportedRowError(
            "no_reward", f"the rollout of the row {row.trace_id} has no reward, and the record needs one"
        )
    return float(row.reward)


def require_advantage(row: TrainingRow) -> float:
    """Raises BridgeError for a rollout that is not trained, or that its group gave no advantage."""
    if row.masked:
        raise UnsupportedRowError(
            "masked", f"the rollout of the row {row.trace_id} counts in the baseline and is not trained"
        )
    if row.advantage is None or not math.isfinite(row.advantage):
        raise UnsupportedRowError("no_advantage", f"the row {row.trace_id} has no advantage: see `with_advantages`")
    return float(row.advantage)
