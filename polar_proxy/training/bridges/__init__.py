"""Polar's rows in the records of other trainers: one file a trainer, pure functions from a row to a record.

A bridge adds nothing and leaves nothing out: ids, mask and log-probabilities are those that were recorded, and what a
record cannot hold is refused with BridgeError, never bent. docs/bridges.md says what each trainer does with its record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from polar_proxy.training.bridges import nemo_rl, slime, tinker, trl, verl
from polar_proxy.training.bridges.rows import (
    BridgeError,
    Numbers,
    TokenRow,
    group_advantages,
    groups_of,
    read_jsonl,
    read_row,
    rows_of_group,
    with_advantages,
)
from polar_proxy.types import Json

__all__ = [
    "FORMATS",
    "BridgeError",
    "Records",
    "TokenRow",
    "group_advantages",
    "groups_of",
    "read_jsonl",
    "read_row",
    "rows_of_group",
    "with_advantages",
]

Convert = Callable[[list[TokenRow]], list[Json]]
"""The rows of one rollout -> records. Raises BridgeError."""


def _trl() -> Convert:
    groups = Numbers()
    return lambda rows: trl.record(rows, groups)


def _verl() -> Convert:
    return lambda rows: [verl.agent_loop_output(row) for row in rows]


def _slime() -> Convert:
    samples = slime.Samples()
    return lambda rows: [samples.sample(row) for row in rows]


def _nemo_rl() -> Convert:
    numbers = Numbers()
    return lambda rows: [nemo_rl.datum_spec(rows, numbers[rows[0].trace_id])]


def _tinker() -> Convert:
    return lambda rows: [tinker.datum(row) for row in rows]


FORMATS: dict[str, Callable[[], Convert]] = {
    "trl": _trl,
    "verl": _verl,
    "slime": _slime,
    "nemo-rl": _nemo_rl,
    "tinker": _tinker,
}
"""Names of `polar export --format`; each call begins a data set of its own."""


class Records:
    """Rows of one rollout after another into records of one format; what is refused is counted by reason."""

    def __init__(self, form: str) -> None:
        self._convert = FORMATS[form]()
        self.left_out: Counter[str] = Counter()

    def __call__(self, rows: Sequence[Json]) -> list[Json]:
        """All of a rollout or nothing: half of its sequences would weigh as a whole one."""
        try:
            return self._convert([read_row(row) for row in rows]) if rows else []
        except BridgeError as error:
            self.left_out[error.reason] += len(rows)
            return []
