"""The conversation of one call as a page shows it: messages, and each tool call with its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from polar_proxy.export.conversations import conversation
from polar_proxy.message_text import content_text
from polar_proxy.types import CallRecord, Json


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call of the model. `result` is None if no later message has it."""

    call_id: str
    name: str
    arguments: str
    result: str | None


@dataclass(frozen=True, slots=True)
class ShownMessage:
    role: str
    name: str | None
    text: str
    reasoning: str
    tools: Sequence[ToolUse]
    number: int
    """Position in the request, from 1; for an answer, its index."""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call as a page shows it: the request in OpenAI's form and as the agent sent it, and the answers."""

    earlier: Sequence[ShownMessage]
    """Messages of the request that are already in an earlier call of the conversation: in its request or its answer."""
    left_out: int
    """Number of earlier messages that are not shown, because there are too many."""
    new: Sequence[ShownMessage]
    answers: Sequence[ShownMessage]
    tools: Sequence[tuple[str, str]]
    """Name and description of each tool that the model may call."""
    raw: Sequence[str] | None
    """The messages as they were received, as indented JSON; None if only a separate page shows them."""
    raw_tools: str | None
    problem: str | None
    """Why the request could not be parsed; None if it was parsed. An unparsed request is shown as it was received."""


def show_call(
    call: CallRecord,
    following: CallRecord | None,
    known_messages: int,
    *,
    most: int | None = None,
    with_raw: bool = True,
) -> ShownCall:
    """Return what a page shows of a call.

    `following`: the next call of the conversation, which has the results of this call's tool calls. `known_messages`:
    number of this call's messages that an earlier call had. `most`: maximum number of these known messages to show; the
    newest are shown. `with_raw`: also return the request as it was received.
    """
    request = conversation(call)
    problem = request.get("unparsed")
    messages = request["messages"]
    if problem is not None:
        results = {}
        shown = [_unparsed(message, number) for number, message in enumerate(messages, 1)]
    else:
        results = _results(messages) | _results(_messages_after(following, len(messages)))
        with_their_call = _called(messages)
        shown = [
            _message(message, number, results)
            for number, message in enumerate(messages, 1)
            if message["role"] != "tool" or message.get("tool_call_id") not in with_their_call
        ]
    answers = [
        _message(choice.message.to_openai(), choice.index, results, choice.finish_reason) for choice in call.choices
    ]
    earlier = [one for one in shown if one.number <= known_messages]
    left_out = 0 if most is None else max(0, len(earlier) - most)
    return ShownCall(
        earlier=earlier[left_out:],
        left_out=left_out,
        new=[one for one in shown if one.number > known_messages],
        answers=answers,
        tools=[_tool(tool) for tool in request["tools"] or ()] if problem is None else [],
        raw=[_indented(message) for message in call.messages] if with_raw else None,
        raw_tools=_indented(call.tools) if with_raw and call.tools is not None else None,
        problem=problem,
    )


def _messages_after(call: CallRecord | None, number: int) -> Sequence[Json]:
    """Return the messages of a call after the first `number`; none if its request cannot be parsed."""
    request = {"messages": []} if call is None else conversation(call)
    return [] if request.get("unparsed") else request["messages"][number:]


def _unparsed(message: Any, number: int) -> ShownMessage:
    return ShownMessage("raw", None, _json(message), "", (), number)


def _message(message: Json, number: int, results: Mapping[str, str], finish_reason: str | None = None) -> ShownMessage:
    tools = []
    for tool_call in message.get("tool_calls") or ():
        function, call_id = tool_call["function"], tool_call["id"]
        arguments = readable_arguments(function["arguments"])
        tools.append(ToolUse(call_id, function["name"], arguments, results.get(call_id)))
    return ShownMessage(
        role=message["role"],
        name=message.get("name"),
        text=content_text(message.get("content")),
        reasoning=message.get("reasoning_content") or "",
        tools=tools,
        number=number,
        finish_reason=finish_reason,
    )


def _results(messages: Iterable[Json]) -> dict[str, str]:
    """Return tool call id -> result."""
    return {
        message["tool_call_id"]: content_text(message.get("content"))
        for message in messages
        if message["role"] == "tool" and message.get("tool_call_id")
    }


def _called(messages: Iterable[Json]) -> set[str]:
    return {tool_call["id"] for message in messages for tool_call in message.get("tool_calls") or ()}


def readable_arguments(text: str) -> str:
    """Return the arguments of a tool call, each beginning on a new line. Text that is not a JSON object is returned
    unchanged."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if not isinstance(value, dict):
        return text
    return "\n".join(f"{name}: {one if isinstance(one, str) else _json(one)}" for name, one in value.items())


def _tool(tool: Any) -> tuple[str, str]:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    if not isinstance(function, dict):
        function = {}
    return str(function.get("name", tool)), str(function.get("description") or "")


def _indented(stored: bytes) -> str:
    try:
        return _json(orjson.loads(stored))
    except orjson.JSONDecodeError:
        return stored.decode(errors="replace")


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
