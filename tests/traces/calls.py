"""Calls for the builders, written by hand or grown at random into the trees that real sessions make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from polar_proxy.types import CallRecord, Choice

_BASE = CallRecord(
    call_id="",
    session_id="sess_1",
    dialect="openai_chat",
    path="/v1/chat/completions",
    stream=False,
    model="m",
    engine=None,
    weight_version=None,
    logprob_mode="processed",
    status="ok",
    http_status=200,
    error=None,
    edge="root",
    parent_call_id=None,
    messages=(),
    tools=None,
    params={},
    sampling={"temperature": 1.0},
    prompt_ids=None,
    choices=(),
    started_at=0.0,
    first_token_at=None,
    ended_at=0.0,
)


def choice(tokens: Sequence[int], index: int = 0, logprobs: Sequence[float] | None = None) -> Choice:
    """An answer; its log-probabilities tell token and position unless they are given."""
    values = [-(token + 1) / 64 - position / 1024 for position, token in enumerate(tokens)]
    return Choice(
        index=index,
        message={"role": "assistant", "content": " ".join(map(str, tokens))},
        finish_reason="stop",
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.array(values if logprobs is None else logprobs, dtype=np.float32),
    )


def call(name: str, at: float, prompt: Sequence[int] | None, *choices: Sequence[int], **changes: Any) -> CallRecord:
    """`call("a", 0.0, [1, 2], [3, 4])`: one answered call that started at that time."""
    return replace(
        _BASE,
        call_id=name,
        prompt_ids=None if prompt is None else np.array(prompt, dtype=np.int32),
        choices=tuple(choice(tokens, index) for index, tokens in enumerate(choices)),
        started_at=at,
        **changes,
    )


@dataclass(frozen=True)
class Wound:
    """What is wrong with a call, and the reason for which it must be excluded."""

    reason: str | None
    changes: dict[str, Any]
    logprob: float | None = None
    """Written over one log-probability."""


WOUNDS = (
    *(Wound(status, {"status": status}) for status in ("client_gone", "upstream_error", "no_tokens")),
    Wound("side_call", {"edge": "side_call"}),
    Wound("no_tokens", {"prompt_ids": None}),
    Wound("no_tokens", {"choices": ()}),
    Wound("no_tokens", {"choices": (choice([]),)}),
    Wound("no_tokens", {"choices": (choice([1, 2], logprobs=[-0.5]),)}),
    *(Wound("no_logprobs", {}, value) for value in (math.nan, -math.inf, math.inf, -9999.0)),
    Wound("constrained", {"sampling": {"temperature": 1.0, "constrained": True}}),
)
HARMLESS = (
    Wound(
        None,
        {
            "sampling": {"temperature": 1.0, "constrained": False},
            "params": {"response_format": {"type": "json_object"}},
        },
    ),
    Wound(None, {"params": {"response_format": {"type": "text"}, "tool_choice": "auto"}}),
    Wound(None, {"params": {"response_format": None, "tool_choice": None}}),
    Wound(None, {"edge": "continues"}),
    Wound(None, {"edge": "rewinds"}),
    Wound(None, {"edge": "subagent"}),
    Wound(None, {"edge": "compacts"}),
    Wound(None, {"edge": "retries"}),  # of a call that is not there
)


def wounded(record: CallRecord, wound: Wound) -> CallRecord:
    if wound.logprob is not None:
        hurt = []
        for own in record.choices:
            values = own.logprobs.copy()
            values[-1] = wound.logprob
            hurt.append(replace(own, logprobs=values))
        record = replace(record, choices=tuple(hurt))
    return replace(record, **wound.changes)


_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)
"""A tiny vocabulary, so that histories look alike by chance too."""


@st.composite
def sessions(draw: st.DrawFn) -> tuple[list[CallRecord], dict[str, str]]:
    """(the calls of a session in any order, the reason for each call that must be excluded)."""
    records: list[CallRecord] = []
    expected: dict[str, str] = {}
    for number in range(draw(st.integers(0, 7))):
        prompt = draw(_prompts(records))
        answers = draw(st.lists(_tokens, min_size=1, max_size=3))
        # Equal times: a retry may start in the same instant.
        record = call(f"call_{number}", float(draw(st.integers(max(0, number - 1), number))), prompt, *answers)
        wound = draw(st.none() | st.sampled_from((*WOUNDS, *HARMLESS)))
        if wound is not None:
            record = wounded(record, wound)
            if wound.reason is not None:
                expected[record.call_id] = wound.reason
        records.append(record)
    return draw(st.permutations(records)), expected


@st.composite
def _prompts(draw: st.DrawFn, before: list[CallRecord]) -> list[int]:
    """A new prompt, an earlier one again, or one that continues an answer: exactly, drifted, or rewound."""
    usable = [record for record in before if record.prompt_ids is not None and record.choices]
    kind = draw(st.sampled_from(("new", "empty", "same", "exact", "exact", "exact", "bare", "drifted", "rewound")))
    if kind == "empty":
        return []
    if kind == "new" or not usable:
        return draw(_tokens)
    parent = usable[-1] if draw(st.booleans()) else draw(st.sampled_from(usable))
    assert parent.prompt_ids is not None
    prompt: list[int] = parent.prompt_ids.tolist()
    said: list[int] = draw(st.sampled_from(parent.choices)).token_ids.tolist()
    if kind == "same":
        return prompt
    if kind == "bare":  # the next prompt is all that was, with nothing new
        return prompt + said
    if kind == "drifted":
        whole = prompt + said
        if whole:
            place = draw(st.integers(0, len(whole) - 1))
            whole[place] = (whole[place] + 1) % 4
        return whole + draw(_tokens)
    if kind == "rewound":
        return prompt[: draw(st.integers(0, len(prompt)))] + draw(_tokens)
    return prompt + said + draw(_tokens)
