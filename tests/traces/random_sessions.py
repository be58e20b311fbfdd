"""Random sessions for the builders: the trees of calls that real sessions make, some of them with a defect."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from polar_proxy.types import CallRecord
from tests.factories import answer, call


@dataclass(frozen=True)
class CallDefect:
    """Something wrong with a call, and the reason for which the call must be excluded."""

    reason: str | None
    changes: dict[str, Any]
    logprob: float | None = None
    """Replaces one log-probability."""


DEFECTS = (
    *(CallDefect(status, {"status": status}) for status in ("client_gone", "upstream_error", "no_tokens")),
    CallDefect("side_call", {"edge": "side_call"}),
    CallDefect("no_tokens", {"prompt_ids": None}),
    CallDefect("no_tokens", {"choices": ()}),
    CallDefect("no_tokens", {"choices": (answer([]),)}),
    CallDefect("no_tokens", {"choices": (answer([1, 2], logprobs=[-0.5]),)}),
    *(CallDefect("no_logprobs", {}, value) for value in (math.nan, -math.inf, math.inf, -9999.0)),
    CallDefect("constrained", {"sampling": {"temperature": 1.0, "constrained": True}}),
)
HARMLESS_CHANGES = (
    CallDefect(
        None,
        {
            "sampling": {"temperature": 1.0, "constrained": False},
            "params": {"response_format": {"type": "json_object"}},
        },
    ),
    CallDefect(None, {"params": {"response_format": {"type": "text"}, "tool_choice": "auto"}}),
    CallDefect(None, {"params": {"response_format": None, "tool_choice": None}}),
    CallDefect(None, {"edge": "continues"}),
    CallDefect(None, {"edge": "rewinds"}),
    CallDefect(None, {"edge": "subagent"}),
    CallDefect(None, {"edge": "compacts"}),
    CallDefect(None, {"edge": "retries"}),  # of a call that is not there
)


def with_defect(record: CallRecord, defect: CallDefect) -> CallRecord:
    if defect.logprob is not None:
        choices = []
        for choice in record.choices:
            values = choice.logprobs.copy()
            values[-1] = defect.logprob
            choices.append(replace(choice, logprobs=values))
        record = replace(record, choices=tuple(choices))
    return replace(record, **defect.changes)


_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)
"""The vocabulary is tiny, so that some histories are equal by chance."""


@st.composite
def sessions(draw: st.DrawFn) -> tuple[list[CallRecord], dict[str, str]]:
    """Draw the calls of a session in any order, and call id -> reason of the calls that must be excluded."""
    records: list[CallRecord] = []
    expected: dict[str, str] = {}
    for number in range(draw(st.integers(0, 7))):
        prompt = draw(_prompts(records))
        answers = draw(st.lists(_tokens, min_size=1, max_size=3))
        # Start times may be equal: a retry can start in the same instant.
        record = call(f"call_{number}", float(draw(st.integers(max(0, number - 1), number))), prompt, *answers)
        defect = draw(st.none() | st.sampled_from((*DEFECTS, *HARMLESS_CHANGES)))
        if defect is not None:
            record = with_defect(record, defect)
            if defect.reason is not None:
                expected[record.call_id] = defect.reason
        records.append(record)
    return draw(st.permutations(records)), expected


@st.composite
def _prompts(draw: st.DrawFn, before: list[CallRecord]) -> list[int]:
    """Draw a new prompt, an earlier one again, or one that continues an answer: exactly, drifted, or rewound."""
    usable = [record for record in before if record.prompt_ids is not None and record.choices]
    kind = draw(st.sampled_from(("new", "empty", "same", "exact", "exact", "exact", "bare", "drifted", "rewound")))
    if kind == "empty":
        return []
    if kind == "new" or not usable:
        return draw(_tokens)
    parent = usable[-1] if draw(st.booleans()) else draw(st.sampled_from(usable))
    assert parent.prompt_ids is not None
    prompt: list[int] = parent.prompt_ids.tolist()
    answered: list[int] = draw(st.sampled_from(parent.choices)).token_ids.tolist()
    if kind == "same":
        return prompt
    if kind == "bare":  # the next prompt adds nothing to the last call
        return prompt + answered
    if kind == "drifted":
        whole = prompt + answered
        if whole:
            position = draw(st.integers(0, len(whole) - 1))
            whole[position] = (whole[position] + 1) % 4
        return whole + draw(_tokens)
    if kind == "rewound":
        return prompt[: draw(st.integers(0, len(prompt)))] + draw(_tokens)
    return prompt + answered + draw(_tokens)
