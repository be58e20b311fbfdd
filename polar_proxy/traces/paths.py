"""Whole sequences from traces that hold only their own tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar_proxy.types import Logprobs, TokenIds, Trace


@dataclass(frozen=True, slots=True)
class TracePath:
    """A whole sequence: `token_ids` int32 [n], `loss_mask` uint8 [n], `logprobs` float32 [n], NaN off the mask."""

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Logprobs
    own: int
    """Where the trace's own tokens begin. What stands before is trained with the traces that it belongs to."""


def trace_path(trace: Trace, traces: Iterable[Trace] | Mapping[str, Trace]) -> TracePath:
    """All tokens from the root to the end of a trace. `traces`: those of its build, its ancestors among them.

    Raises ValueError where an ancestor is missing or has no token where the branch is (so a circle cannot be).
    """
    by_id = traces if isinstance(traces, Mapping) else {one.trace_id: one for one in traces}
    pieces = [(trace, len(trace.token_ids))]
    here = trace
    while here.parent_trace_id is not None:
        parent = by_id.get(here.parent_trace_id)
        if parent is None:
            raise ValueError(f"The trace {here.trace_id} branches from {here.parent_trace_id}, which is not there")
        own = here.branch_at - parent.branch_at
        if not 0 < own <= len(parent.token_ids):
            raise ValueError(f"The trace {here.trace_id} branches from {parent.trace_id} where that has no token")
        pieces.append((parent, own))
        here = parent
    pieces.reverse()
    return TracePath(
        np.concatenate([one.token_ids[:own] for one, own in pieces]),
        np.concatenate([one.loss_mask[:own] for one, own in pieces]),
        np.concatenate([one.logprobs[:own] for one, own in pieces]),
        trace.branch_at,
    )
