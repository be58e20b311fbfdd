"""Rows of `tokens-jsonl` back into traces."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar_proxy.errors import PolarError
from polar_proxy.types import Json, Logprobs, Span, Trace


class RowError(PolarError):
    """A row that is no row of `tokens-jsonl`, or whose parts do not fit together."""


def read_trace(row: Json) -> Trace:
    """The trace that a row was written from, bit by bit (its reward is the rollout's where it has none of its own).

    `token_ids` int32 [n], `loss_mask` uint8 [n], `logprobs` float32 [n] nats, NaN off the mask. Raises RowError.
    """
    try:
        prompt, response = row["prompt_ids"], row["response_ids"]
        token_ids = np.array([*prompt, *response], np.int32)
        loss_mask = np.array([0] * len(prompt) + row["loss_mask"], np.uint8)
        logprobs: Logprobs = np.array([np.nan] * len(prompt) + row["logprobs"], np.float32)  # null becomes NaN
        spans = tuple(
            Span(span["kind"], span["call_id"], span["start"], span["end"], span["choice"]) for span in row["spans"]
        )
        rest: Any = {name: row[name] for name in ("trace_id", "session_id", "builder", "grade", "reward")}
        index = row["trace_index"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RowError(f"A row is no row of tokens-jsonl: {error!r}") from error
    length = sum(span.end - span.start for span in spans)
    if not len(token_ids) == len(loss_mask) == len(logprobs) == length:
        raise RowError(f"The row {rest['trace_id']} does not fit together: ids, mask, log-probabilities and spans")
    return Trace(
        **rest,
        rollout_id=row.get("rollout_id"),
        index=index,
        prompt_length=len(prompt),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        spans=spans,
        call_ids=tuple(dict.fromkeys(span.call_id for span in spans)),
        parent_trace_id=row.get("parent_trace_id"),
        branch_at=row.get("branch_at") or 0,
        rescored=row["builder"] == "rescored",
    )
