"""One drifted call, explained: where its prompt leaves the sampled tokens, what stands there, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar_proxy.dialects import recorded_request
from polar_proxy.engines.base import Engine
from polar_proxy.sessions import prompt_config
from polar_proxy.traces.drift import DriftEvent, base_choice
from polar_proxy.traces.drift_causes import DriftCause, ToolsChange, explain_drift
from polar_proxy.types import CallRecord, ChatRequest, Choice, TokenIds

_BEFORE = 12
_AFTER = 12


@dataclass(frozen=True, slots=True)
class ExplainedDrift:
    """Where a call's prompt first differs from its base's prompt and answer."""

    call_id: str
    base_call_id: str
    position: int
    """Index of the first token that differs, in the prompt."""
    in_answer: int | None
    """The same, counted from the start of the base's answer; None where it is before it."""
    before: str
    """Text of the tokens before it, the same on both sides."""
    sampled: tuple[str, ...]
    """Texts of the tokens from there on, as they were sampled (or stood in the base's prompt)."""
    rendered: tuple[str, ...]
    """Texts of the tokens from there on, as the engine rendered them."""
    causes: tuple[DriftCause, ...]
    """`retokenised` in front of others: the first tokens that differ read alike; further on the text differs too."""


async def explain(engine: Engine, finding: DriftEvent, call: CallRecord, base: CallRecord) -> ExplainedDrift:
    """A drifted call and its base, explained. `engine` is asked for texts only."""
    choice = base_choice(call, base)
    assert choice is not None, finding
    assert base.prompt_ids is not None, finding
    assert call.prompt_ids is not None, finding
    expected = np.concatenate([base.prompt_ids, choice.token_ids])
    position = finding.position
    start = len(base.prompt_ids)
    context, answer = await _text(engine, base.prompt_ids), await _text(engine, choice.token_ids)
    found = await _text(engine, call.prompt_ids)
    sampled, rendered = await _texts(engine, expected[position:]), await _texts(engine, call.prompt_ids[position:])
    named = explain_drift(context, answer, found, reasoning=_reasoning(base, choice), tools=_tools(base, call))
    return ExplainedDrift(
        call.call_id,
        base.call_id,
        position,
        position - start if position >= start else None,
        await _text(engine, expected[max(position - _BEFORE, 0) : position]),
        sampled,
        rendered,
        _first(sampled, rendered, named),
    )


def _first(
    sampled: tuple[str, ...], rendered: tuple[str, ...], named: tuple[DriftCause, ...]
) -> tuple[DriftCause, ...]:
    """`named`, behind `retokenised` where the texts differ only later than the first tokens that do."""
    if named == ("retokenised",) or not sampled or not rendered:
        return named
    size = max(len(sampled[0]), len(rendered[0]))
    alike = "".join(sampled)[:size] == "".join(rendered)[:size]
    return ("retokenised", *named) if alike else named


def _tools(base: CallRecord, call: CallRecord) -> ToolsChange:
    if base.tools == call.tools:
        return "same"
    asked = [recorded_request(one) for one in (base, call)]
    frames = {prompt_config(request)[0] for request in asked if isinstance(request, ChatRequest)}
    return "changed" if len(frames) > 1 else "rewritten"


async def _text(engine: Engine, ids: TokenIds) -> str:
    return await engine.decode(ids.tolist()) if ids.size else ""


async def _texts(engine: Engine, ids: TokenIds) -> tuple[str, ...]:
    return tuple([await engine.decode([token]) for token in ids[:_AFTER].tolist()])


def _reasoning(base: CallRecord, choice: Choice) -> list[str]:
    request = recorded_request(base)
    said = [message.reasoning for message in request.messages] if isinstance(request, ChatRequest) else []
    return [text for text in (*said, choice.message.reasoning) if isinstance(text, str)]
