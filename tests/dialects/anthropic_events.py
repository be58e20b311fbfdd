"""Strategies for answers cut into events, and a client's reading of Anthropic's stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from polar_proxy.types import Json, SampleEvent, ToolCall, ToolDelta

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
OBJECTS = st.builds(json.dumps, st.dictionaries(TEXTS, VALUES, max_size=3), indent=st.sampled_from([None, 1]))
BROKEN = st.sampled_from(["[1]", "1", '"x"', "null", '{"a": ', "{", "{]", "nonsense", '{"a": NaN}', "{} {}"])


def calls(arguments: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[ToolCall, ...]]:
    names = st.sampled_from(["bash", "edit", "Read"])
    return st.lists(st.tuples(names, arguments), max_size=3).map(
        lambda made: tuple(ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(made))
    )


def finish(tool_calls: Sequence[ToolCall]) -> str:
    return "tool_calls" if tool_calls else "stop"


@st.composite
def cut(draw: st.DrawFn, reasoning: str, text: str, tool_calls: Sequence[ToolCall]) -> list[SampleEvent]:
    """Return one answer as events: reasoning, text and calls in order, in pieces of any size."""
    size = draw(st.integers(1, 8))
    events = [SampleEvent(reasoning=piece) for piece in pieces(reasoning, size)]
    events += [SampleEvent(text=piece) for piece in pieces(text, size)]
    for number, call in enumerate(tool_calls):
        first, *rest = pieces(call.arguments, size) or [""]
        events.append(SampleEvent(tool_calls=(ToolDelta(number, call.id, call.name, first),)))
        events += [SampleEvent(tool_calls=(ToolDelta(number, arguments=piece),)) for piece in rest]
    events = merged(events, draw(st.integers(0, 2**16 - 1)))
    opening = SampleEvent(prompt_ids=(5, 6, 7), token_ids=(1,), logprobs=(-1.0,))
    last = SampleEvent(token_ids=(2,), logprobs=(-1.0,), cached_tokens=2, finish_reason=finish(tool_calls))
    return [opening, *events, last]


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def merged(events: list[SampleEvent], mask: int) -> list[SampleEvent]:
    """Merge some neighbouring events (those whose bit is set), as a fast engine does."""
    out: list[SampleEvent] = []
    for number, event in enumerate(events):
        last = out[-1] if out else SampleEvent()
        in_order = not (last.tool_calls and (event.text or event.reasoning)) and not (last.text and event.reasoning)
        if out and in_order and mask >> (number % 16) & 1:
            out[-1] = SampleEvent(
                text=last.text + event.text,
                reasoning=last.reasoning + event.reasoning,
                tool_calls=last.tool_calls + event.tool_calls,
            )
        else:
            out.append(event)
    return out


def read_stream(stream: bytes) -> Json:
    """Return the message that an SDK assembles. Asserts the order of the events."""
    message: Json = {}
    inputs: dict[int, str] = {}
    done: set[int] = set()
    for chunk in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = chunk.partition("\n")
        event: Json = json.loads(data.removeprefix("data: "))
        assert name == "event: " + event["type"]
        assert "stop_reason" not in message or message["stop_reason"] is None or event["type"] == "message_stop"
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                assert done == set(range(event["index"])), "two blocks are open at the same time"
                message["content"].append(event["content_block"])
                inputs[event["index"]] = ""
            case "content_block_delta":
                assert event["index"] not in done
                _add(message["content"][event["index"]], event["delta"], inputs, event["index"])
            case "content_block_stop":
                assert event["index"] not in done
                done.add(event["index"])
                if message["content"][event["index"]]["type"] == "tool_use":
                    message["content"][event["index"]]["input"] = json.loads(inputs[event["index"]] or "{}")
            case "message_delta":
                assert done == set(range(len(message["content"])))
                message["stop_reason"] = event["delta"]["stop_reason"]
                message["stop_sequence"] = event["delta"]["stop_sequence"]
                message["usage"] |= event["usage"]
            case kind:
                assert kind in ("ping", "message_stop")
    assert event["type"] == "message_stop"
    return message


def _add(block: Json, delta: Any, inputs: dict[int, str], index: int) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            inputs[index] += delta["partial_json"]
        case kind:
            raise AssertionError(kind)
