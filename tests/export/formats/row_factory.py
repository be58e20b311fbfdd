"""Rows of tokens-jsonl written by hand: groups of rollouts in which all numbers differ."""

from __future__ import annotations

from typing import Any

from polar_proxy.types import Json

PROMPT = [11, 12, 13]
SAMPLED = {"temperature": 1.0, "changes": {}, "logprob_mode": "raw"}
SPANS = [
    {"kind": "context", "call_id": "call_a", "choice": 0, "start": 0, "end": 3},
    {"kind": "sampled", "call_id": "call_a", "choice": 0, "start": 0, "end": 2, **SAMPLED, "versions": [[0, "4"]]},
    {"kind": "context", "call_id": "call_b", "choice": 0, "start": 5, "end": 7},
    {
        "kind": "sampled",
        "call_id": "call_b",
        "choice": 0,
        "start": 0,
        "end": 3,
        **SAMPLED,
        "versions": [[0, "4"], [2, "5"]],
    },
]


def row(group: int = 0, rollout: int = 0, trace: int = 0, **changes: Any) -> Json:
    """Two turns: 3 prompt tokens, 2 sampled, 2 of context, 3 sampled."""
    base = 100 * group + 10 * rollout + trace
    made: Json = {
        "schema": 1,
        "rollout_id": f"roll_{group}_{rollout}",
        "group_id": f"group_{group}",
        "task_id": f"task_{group}",
        "session_id": f"sess_{group}_{rollout}",
        "trace_id": f"trace_{group}_{rollout}_{trace}",
        "status": "done",
        "masked": False,
        "reward": float(rollout % 2),
        "trace_index": trace,
        "builder": "merged",
        "grade": "exact",
        "prompt_ids": PROMPT,
        "response_ids": [20 + base % 50, 21, 31, 32, 22, 23, 24],
        "loss_mask": [1, 1, 0, 0, 1, 1, 1],
        "logprobs": [-0.5 - base / 1024, -0.25, None, None, -1.5, -2.0, -0.125],
        "spans": SPANS,
    }
    return made | changes


def group(number: int = 0, size: int = 4) -> list[Json]:
    return [row(number, rollout) for rollout in range(size)]


def with_sampling(**changes: Any) -> list[Json]:
    """Return the spans of `row` with other values of the sampled ones."""
    return [span | changes if span["kind"] == "sampled" else span for span in SPANS]
