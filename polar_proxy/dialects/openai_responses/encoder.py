"""The answer to a Responses request: one object, or the stream of events from which a client assembles it.

Promises: events are numbered without gaps. One item is open at a time. So the stream suits clients that track only one
current item as well as clients that use indexes. An item is closed when the next one begins; the item that is open when
the engine ends is closed in `end`, after the commit, with `response.completed` or `response.incomplete`.

To keep this order, a tool call waits until the earlier one is complete. Text after a tool call waits until that call is
complete and no other call waits; white space alone waits until the end. Calls of built-in tools are sent in one piece
when they are complete, and so are calls of custom tools whose arguments do not begin with `{"input": "`. The text of
other custom calls is decoded as it arrives; if the complete arguments turn out not to have the form `{"input": text}`,
the `done` event and the item hold the argument string instead.

A delta has the log-probabilities of the engine's event that brought its text; the `done` event has the
log-probabilities of the whole text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import orjson

from polar_proxy.dialects.base import Answer, AnswerChoice, Encoder
from polar_proxy.dialects.custom_tools import CustomInputDecoder
from polar_proxy.dialects.openai_common import token_logprobs
from polar_proxy.dialects.openai_responses.items import (
    call_item,
    item_id,
    message_item,
    output_text,
    reasoning_item,
    response_id,
)
from polar_proxy.dialects.openai_responses.tools import ResponsesTools
from polar_proxy.dialects.wire import is_json_object, named_sse
from polar_proxy.types import ChatRequest, Json, SampleEvent, ToolCall, ToolDelta

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_STREAMED_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items of tool calls by type, each with the field that is streamed. Other items are sent in one piece."""


class _TextNames(NamedTuple):
    """Names in the events that stream a message or reasoning. `text` and `part` are words in the types of the events,
    as in `response.{text}.delta`; `part_index` is the name of the field with the index of the part."""

    text: str
    part: str
    part_index: str


_TEXT_NAMES = {
    "message": _TextNames("output_text", "content_part", "content_index"),
    "reasoning": _TextNames("reasoning_summary_text", "reasoning_summary_part", "summary_index"),
}


@dataclass
class _OpenText:
    kind: str
    """`message` or `reasoning`."""
    id: str
    pieces: list[str] = field(default_factory=list)


@dataclass
class _StreamedToolCall:
    """A tool call as far as it has arrived. `added`: the client got the event that opens its item."""

    number: int
    """Position among the tool calls of the answer, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    kind: str = "function"
    item_id: str = ""
    added: bool = False
    decoder: CustomInputDecoder = field(default_factory=CustomInputDecoder)

    @property
    def complete(self) -> bool:
        """True if the arguments are a complete object, so that no more can follow."""
        return is_json_object(self.arguments)


@dataclass
class ResponsesEncoder(Encoder):
    tools: ResponsesTools
    echo: Json
    """The request's fields that every response object repeats."""
    logprobs: bool
    _sequence_number: int = field(default=0, init=False)
    _started: bool = field(default=False, init=False)
    _streams: bool = field(default=True, init=False)
    _items: list[Json] = field(default_factory=list, init=False)
    """Closed items in order. An open item gets the next position."""
    _open: _OpenText | _StreamedToolCall | None = field(default=None, init=False)
    _calls: dict[int, _StreamedToolCall] = field(default_factory=dict, init=False)
    _waiting_calls: list[_StreamedToolCall] = field(default_factory=list, init=False)
    _waiting_texts: list[tuple[str, str]] = field(default_factory=list, init=False)
    """Texts that arrived while a tool call was open, each as (`message` or `reasoning`, text)."""
    _received: AnswerChoice = field(default_factory=AnswerChoice, init=False)
    """The reasoning and the tokens so far. The tokens give the log-probabilities of a message when it is closed."""

    # The stream.

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        if event.index != 0:
            return b""
        out = self._start()
        self._received.tokens.extend(event.tokens)
        self._received.logprobs.extend(event.logprobs)
        self._received.top.extend(event.top)
        if event.reasoning:
            self._received.reasoning.append(event.reasoning)
            out += self._text("reasoning", event.reasoning, [])
        if event.text:
            logprobs = token_logprobs(event) if self.logprobs else []
            out += self._text("message", event.text, logprobs)
        for delta in event.tool_calls:
            out += self._call(delta)
        return out

    def end(self, answers: list[Answer]) -> bytes:
        choice = answers[0].first
        out = self._start()
        if not self._items and self._open is None and not self._waiting_calls and not self._waiting_texts:
            out += self._open_text("message")
        while self._waiting_calls or self._waiting_texts:
            out += self._close("completed")
            if self._waiting_calls:
                out += self._open_call(self._waiting_calls.pop(0))
            else:
                kind, text = self._waiting_texts.pop(0)
                out += self._open_text(kind) + self._text_delta(text, [])
        status = "incomplete" if choice.finish_reason in _INCOMPLETE else "completed"
        out += self._close(status)
        return out + self._event(f"response.{status}", response=self._finished(answers[0]))

    def fail(self, message: str, status: int) -> bytes:
        code = {429: "rate_limit_exceeded"}.get(status, "invalid_prompt" if status < 500 else "server_error")
        out = self._start()
        response = self._response("failed", error={"code": code, "message": message})
        return out + self._event("response.failed", response=response)

    def respond(self, answers: list[Answer]) -> bytes:
        # The items are those of a stream with a single event, whose bytes are not needed.
        self._streams = False
        self.feed(0, answers[0].first.as_event())
        self.end(answers)
        return orjson.dumps(self._finished(answers[0]))

    def warmed_up(self, answer: Answer) -> bytes:
        return self._start() + self._event("response.completed", response=self._finished(answer))

    def unfinished(self, status: str) -> bytes:
        return orjson.dumps(self._response(status))

    def ended_early(self, status: str, message: str) -> bytes:
        """Return the response object of a background call that was cancelled or has failed."""
        error = {"code": "server_error", "message": message} if status == "failed" else None
        return orjson.dumps(self._response(status, error=error))

    def replay(self, answer: Answer) -> bytes:
        """Return the whole stream of a recorded answer. Each of its texts comes in one piece."""
        return self.feed(0, answer.first.as_event()) + self.end([answer])

    # Text and reasoning.

    def _text(self, kind: str, text: str, logprobs: list[Json]) -> bytes:
        opened = self._open
        if isinstance(opened, _OpenText) and opened.kind == kind:
            return self._text_delta(text, logprobs)
        if isinstance(opened, _StreamedToolCall):
            return self._text_after_call(opened, kind, text)
        return self._close("completed") + self._open_text(kind) + self._text_delta(text, logprobs)

    def _text_after_call(self, call: _StreamedToolCall, kind: str, text: str) -> bytes:
        """Keep text that arrives while a tool call is open. Return the events of the kept text if it may be sent now,
        else nothing.

        The text may be sent once the open call is complete, no other call is waiting, and the text has more than white
        space.
        """
        if self._waiting_texts and self._waiting_texts[-1][0] == kind:
            self._waiting_texts[-1] = (kind, self._waiting_texts[-1][1] + text)
        else:
            self._waiting_texts.append((kind, text))
        only_space = not any(held.strip() for _, held in self._waiting_texts)
        if self._waiting_calls or not call.complete or only_space:
            return b""
        out = b""
        for held_kind, held in self._waiting_texts:
            out += self._close("completed") + self._open_text(held_kind) + self._text_delta(held, [])
        self._waiting_texts = []
        return out

    def _open_text(self, kind: str) -> bytes:
        prefix = "rs" if kind == "reasoning" else "msg"
        number = sum(item["type"] == kind for item in self._items)
        opened = self._open = _OpenText(kind, item_id(prefix, self.call_id, number))
        if kind == "reasoning":
            item: Json = {"id": opened.id, "type": "reasoning", "status": "in_progress", "summary": []}
            part: Json = {"type": "summary_text", "text": ""}
        else:
            item = {"id": opened.id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
            part = output_text("", [])
        return self._added(item) + self._part_event(opened, "added", part)

    def _text_delta(self, text: str, logprobs: list[Json]) -> bytes:
        opened = self._open
        assert isinstance(opened, _OpenText)
        opened.pieces.append(text)
        return self._text_event(opened, "delta", logprobs, delta=text)

    def _close_text(self, opened: _OpenText, status: str) -> bytes:
        text = "".join(opened.pieces)
        logprobs = _message_logprobs(self._received, text) if self.logprobs and opened.kind == "message" else []
        if opened.kind == "reasoning":
            item = reasoning_item(opened.id, text, status)
            (part,) = item["summary"]
        else:
            item = message_item(opened.id, text, status, logprobs)
            (part,) = item["content"]
        out = self._text_event(opened, "done", logprobs, text=text)
        return out + self._part_event(opened, "done", part) + self._done(item)

    def _text_event(self, opened: _OpenText, suffix: str, logprobs: list[Json], **fields: str) -> bytes:
        names = _TEXT_NAMES[opened.kind]
        extra = {} if opened.kind == "reasoning" else {"logprobs": logprobs}
        location = {**self._location(opened.id), names.part_index: 0}
        return self._event(f"response.{names.text}.{suffix}", **location, **fields, **extra)

    def _part_event(self, opened: _OpenText, suffix: str, part: Json) -> bytes:
        names = _TEXT_NAMES[opened.kind]
        location = {**self._location(opened.id), names.part_index: 0}
        return self._event(f"response.{names.part}.{suffix}", **location, part=part)

    # Tool calls.

    def _call(self, delta: ToolDelta) -> bytes:
        call = self._calls.get(delta.index)
        if call is None:
            call = self._calls[delta.index] = _StreamedToolCall(delta.index)
            self._waiting_calls.append(call)
        call.id = call.id or delta.id or ""
        call.name = call.name or delta.name or ""
        call.arguments += delta.arguments
        if call is self._open:
            return self._call_delta(call, delta.arguments)
        out = b""
        while self._next_call_may_open():
            out += self._close("completed") + self._open_call(self._waiting_calls.pop(0))
        return out

    def _next_call_may_open(self) -> bool:
        if not self._waiting_calls or not self._waiting_calls[0].name:
            return False
        return not isinstance(self._open, _StreamedToolCall) or self._open.complete

    def _open_call(self, call: _StreamedToolCall) -> bytes:
        self._open = call
        tool = self.tools.by_name.get(call.name)
        call.kind = tool.kind if tool else "function"
        out = self._announce(call, self._call_item(call, "")) if call.kind == "function" else b""
        return out + self._call_delta(call, call.arguments)

    def _call_delta(self, call: _StreamedToolCall, piece: str) -> bytes:
        if call.kind == "function":
            return self._piece(call, "function_call", piece)
        if call.kind != "custom":
            return b""
        out, text = b"", call.decoder.feed(piece)
        if call.decoder.began and not call.added:
            out = self._announce(call, self._call_item(call, '{"input":""}'))
        return out + self._piece(call, "custom_tool_call", text)

    def _close_call(self, call: _StreamedToolCall, status: str) -> bytes:
        item = self._call_item(call, call.arguments, status)
        kind = item["type"]
        if kind not in _STREAMED_FIELDS:
            return self._added({**item, "status": "in_progress"}) + self._done(item)
        streamed = _STREAMED_FIELDS[kind]
        out = b""
        if not call.added:  # its arguments did not begin as expected, or do not fit the item of a built-in tool
            out = self._announce(call, item) + self._piece(call, kind, item[streamed])
        name = {"name": item["name"]} if kind == "function_call" else {}
        fields = {**self._location(call.item_id), **name, streamed: item[streamed]}
        out += self._event(_streamed_event(kind, "done"), **fields)
        return out + self._done(item)

    def _call_item(self, call: _StreamedToolCall, arguments: str, status: str = "in_progress") -> Json:
        made = ToolCall(call.id, call.name, arguments)
        return call_item(self.tools, made, self.call_id, call.number, status)

    def _announce(self, call: _StreamedToolCall, item: Json) -> bytes:
        call.added, call.item_id = True, item["id"]
        return self._added({**item, _STREAMED_FIELDS[item["type"]]: "", "status": "in_progress"})

    def _piece(self, call: _StreamedToolCall, kind: str, text: str) -> bytes:
        if not text:
            return b""
        return self._event(_streamed_event(kind, "delta"), **self._location(call.item_id), delta=text)

    # Items, events, the response object.

    def _response(self, status: str, **fields: Any) -> Json:
        return {
            "id": response_id(self.call_id),
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._items,
            "usage": None,
            **self.echo,
            **self._effective_fields(),
            **fields,
        }

    def _effective_fields(self) -> Json:
        """Return the model and the sampling parameters that were used, with the API's defaults."""
        assert isinstance(self.sampled, ChatRequest)
        sampling = self.sampled.sampling
        return {
            "model": self.sampled.model,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
        }

    def _finished(self, answer: Answer) -> Json:
        reason = _INCOMPLETE.get(answer.first.finish_reason or "")
        return self._response(
            "incomplete" if reason else "completed",
            completed_at=None if reason or answer.ended_at is None else int(answer.ended_at),
            incomplete_details={"reason": reason} if reason else None,
            usage=usage_object(answer),
        )

    @property
    def _position(self) -> int:
        return len(self._items)

    def _location(self, identity: str) -> Json:
        return {"item_id": identity, "output_index": self._position}

    def _close(self, status: str) -> bytes:
        opened, out = self._open, b""
        if isinstance(opened, _OpenText):
            out = self._close_text(opened, status)
        elif opened is not None:
            out = self._close_call(opened, status)
        self._open = None
        return out

    def _added(self, item: Json) -> bytes:
        return self._event("response.output_item.added", output_index=self._position, item=item)

    def _done(self, item: Json) -> bytes:
        out = self._event("response.output_item.done", output_index=self._position, item=item)
        self._items.append(item)
        return out

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        payload = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_sse(kind, payload)


def usage_object(answer: Answer) -> Json | None:
    """Return the token counts of an answer. If the answer has neither token ids nor usage, return None."""
    if answer.prompt_ids is None and answer.usage is None:
        return None
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": answer.cached_tokens or 0,
            "cache_write_tokens": answer.cache_write_tokens or 0,
        },
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _streamed_event(kind: str, suffix: str) -> str:
    return f"response.{kind}_{_STREAMED_FIELDS[kind]}.{suffix}"


def _message_logprobs(choice: AnswerChoice, text: str) -> list[Json]:
    """Return the log-probabilities of the tokens that spell a message. If the message is not found in the tokens,
    return the log-probabilities of all tokens."""
    joined, reasoning = "".join(choice.tokens), "".join(choice.reasoning)
    start = joined.find(text, max(0, joined.find(reasoning)) + len(reasoning) if reasoning else 0)
    if start < 0 or not text:
        return token_logprobs(choice)
    ends = list(accumulate(map(len, choice.tokens)))
    first, last = bisect_right(ends, start), bisect_left(ends, start + len(text))
    keep = slice(first, last + 1)
    return token_logprobs(
        AnswerChoice(logprobs=choice.logprobs[keep], tokens=choice.tokens[keep], top=choice.top[keep])
    )
