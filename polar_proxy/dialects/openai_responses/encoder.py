"""The answer to a Responses request: one object, or events that add up to it.

Promises: events are numbered without gaps. One item is open at a time: clients that follow a single current item read
it as well as those that go by index. An item is closed when the next one begins; what is open when the engine ends is
closed in `end`, behind the commit, with `response.completed` or `response.incomplete`.

For that, a tool call waits while an earlier one is not whole, and text behind a call is told when that call is closed
(white space alone: at the end). Every call that does not stream its arguments is told in one piece when it is whole:
those of built-in tools, and of custom tools whose arguments do not begin as they should. A custom tool's text is
decoded as it comes; if what follows it breaks the form, its `done` event and item tell the argument string instead.

Log-probabilities in a delta are those of the engine's event that brought the text; its `done` has those of the text.
"""

from __future__ import annotations

from typing import Any

import orjson

from polar_proxy.dialects.base import Answer, AnswerChoice, Encoder
from polar_proxy.dialects.openai_responses.custom_input import CustomInputDecoder
from polar_proxy.dialects.openai_responses.items import call_item, item_id, message_item, output_text, reasoning_item
from polar_proxy.dialects.openai_responses.response import ResponseObject, last_status, tokens
from polar_proxy.dialects.openai_responses.tools import Toolbox
from polar_proxy.types import Json, SampleEvent, ToolCall, ToolDelta


class ResponsesEncoder(Encoder):
    def __init__(self, options: Json, call_id: str, created: int) -> None:
        self._object = ResponseObject(call_id, created, options["tools"], options["echo"], options["logprobs"])
        self._tools: Toolbox = options["tools"]
        self._call_id = call_id
        self._number = 0
        self._begun = False
        self._items: list[Json] = []
        """Closed items in order; an open one has the next place."""
        self._open: _OpenText | _OpenCall | None = None
        self._calls: dict[int, _OpenCall] = {}
        self._waiting: list[_OpenCall] = []
        self._late: list[tuple[str, str]] = []
        self._heard = AnswerChoice()
        """Reasoning and tokens so far, for the log-probabilities of a message."""

    # The stream.

    def feed(self, part: int, event: SampleEvent) -> bytes:
        if event.index != 0:
            return b""
        out = self._begin()
        self._heard.tokens.extend(event.tokens)
        self._heard.logprobs.extend(event.logprobs)
        self._heard.top.extend(event.top)
        if event.reasoning:
            self._heard.reasoning.append(event.reasoning)
            out += self._say("reasoning", event.reasoning, [])
        if event.text:
            shown = tokens(list(event.tokens), list(event.logprobs), list(event.top)) if self._object.logprobs else []
            out += self._say("message", event.text, shown)
        for delta in event.tool_calls:
            out += self._call(delta)
        return out

    def end(self, answers: list[Answer]) -> bytes:
        state = answers[0].choices.get(0, AnswerChoice())
        out = self._begin()
        if not self._items and self._open is None and not self._waiting and not self._late:
            out += self._open_text("message")
        ending = last_status(state)
        while self._waiting or self._late:
            out += self._close("completed")
            if self._waiting:
                out += self._open_call(self._waiting.pop(0))
            else:
                kind, text = self._late.pop(0)
                out += self._open_text(kind) + self._text_delta(text, [])
        out += self._close(ending)
        response = self._object.finished(answers[0], state, self._items)
        return out + self._event(f"response.{response['status']}", response=response)

    def fail(self, message: str, status: int) -> bytes:
        code = {429: "rate_limit_exceeded"}.get(status, "invalid_prompt" if status < 500 else "server_error")
        out = self._begin()
        response = self._object.of("failed", self._items, error={"code": code, "message": message})
        return out + self._event("response.failed", response=response)

    def respond(self, answers: list[Answer]) -> bytes:
        state = answers[0].choices.get(0, AnswerChoice())
        return orjson.dumps(self._object.finished(answers[0], state, self._object.items(state)))

    # Text and reasoning.

    def _say(self, kind: str, text: str, logprobs: list[Json]) -> bytes:
        now = self._open
        if isinstance(now, _OpenText) and now.kind == kind:
            return self._text_delta(text, logprobs)
        if isinstance(now, _OpenCall):
            if self._late and self._late[-1][0] == kind:
                self._late[-1] = (kind, self._late[-1][1] + text)
            else:
                self._late.append((kind, text))
            if self._waiting or not now.whole or not any(said.strip() for _, said in self._late):
                return b""
            out = b""
            for kind, said in self._late:
                out += self._close("completed") + self._open_text(kind) + self._text_delta(said, [])
            self._late = []
            return out
        return self._close("completed") + self._open_text(kind) + self._text_delta(text, logprobs)

    def _open_text(self, kind: str) -> bytes:
        opened = self._open = _OpenText(kind, item_id("rs" if kind == "reasoning" else "msg", self._call_id, self._at))
        if kind == "reasoning":
            item: Json = {"id": opened.id, "type": "reasoning", "status": "in_progress", "summary": []}
            part = {"type": "summary_text", "text": ""}
            return self._added(item) + self._event(
                "response.reasoning_summary_part.added", **self._place(opened.id), summary_index=0, part=part
            )
        item = {"id": opened.id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return self._added(item) + self._event(
            "response.content_part.added", **self._place(opened.id), content_index=0, part=output_text("", [])
        )

    def _text_delta(self, text: str, logprobs: list[Json]) -> bytes:
        now = self._open
        assert isinstance(now, _OpenText)
        now.said.append(text)
        place = self._place(now.id)
        if now.kind == "reasoning":
            return self._event("response.reasoning_summary_text.delta", **place, summary_index=0, delta=text)
        return self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs)

    def _close_text(self, now: _OpenText, status: str) -> bytes:
        text, place = "".join(now.said), self._place(now.id)
        if now.kind == "reasoning":
            item = reasoning_item(now.id, text, status)
            out = self._event("response.reasoning_summary_text.done", **place, summary_index=0, text=text)
            part = item["summary"][0]
            out += self._event("response.reasoning_summary_part.done", **place, summary_index=0, part=part)
            return out + self._done(item)
        logprobs = self._object.logprobs_of(self._heard, text)
        item = message_item(now.id, text, status, logprobs)
        out = self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=logprobs)
        out += self._event("response.content_part.done", **place, content_index=0, part=item["content"][0])
        return out + self._done(item)

    # Tool calls.

    def _call(self, delta: ToolDelta) -> bytes:
        call = self._calls.get(delta.index)
        if call is None:
            call = self._calls[delta.index] = _OpenCall()
            self._waiting.append(call)
        call.id = call.id or delta.id or ""
        call.name = call.name or delta.name or ""
        call.arguments += delta.arguments
        if call is self._open:
            return self._call_delta(call, delta.arguments)
        out = b""
        while self._waiting and self._waiting[0].name and (not isinstance(self._open, _OpenCall) or self._open.whole):
            out += self._close("completed") + self._open_call(self._waiting.pop(0))
        return out

    def _open_call(self, call: _OpenCall) -> bytes:
        self._open = call
        tool = self._tools.tools.get(call.name)
        call.kind = tool.kind if tool else "function"
        if call.kind == "function":
            call.told = True
            item = {**call_item(self._tools, call.call(""), self._call_id, self._at, "in_progress"), "arguments": ""}
            call.item_id = item["id"]
            return self._added(item) + self._call_delta(call, call.arguments)
        return self._call_delta(call, call.arguments)

    def _call_delta(self, call: _OpenCall, piece: str) -> bytes:
        if call.kind == "function":
            if not piece:
                return b""
            return self._event("response.function_call_arguments.delta", **self._place(call.item_id), delta=piece)
        if call.kind != "custom":
            return b""
        out, text = b"", call.decoder.feed(piece)
        if call.decoder.began and not call.told:
            out = self._open_custom(call, item_id("ctc", self._call_id, self._at))
        return out + self._custom_delta(call, text)

    def _custom_delta(self, call: _OpenCall, text: str) -> bytes:
        if not text:
            return b""
        return self._event("response.custom_tool_call_input.delta", **self._place(call.item_id), delta=text)

    def _open_custom(self, call: _OpenCall, identity: str) -> bytes:
        call.told, call.item_id = True, identity
        item = call_item(self._tools, call.call('{"input":""}'), self._call_id, self._at, "in_progress")
        return self._added({**item, "id": identity})

    def _close_call(self, call: _OpenCall, status: str) -> bytes:
        item = call_item(self._tools, call.call(call.arguments), self._call_id, self._at, status)
        if call.kind == "custom":
            out = b""
            if not call.told:
                out = self._open_custom(call, item["id"])
                out += self._custom_delta(call, item["input"])
            place = self._place(call.item_id)
            out += self._event("response.custom_tool_call_input.done", **place, input=item["input"])
            return out + self._done(item)
        if item["type"] == "function_call":
            out = b""
            if not call.told:  # a built-in tool's call that turned out not to fit its item
                call.kind, call.item_id = "function", item["id"]
                out = self._added({**item, "arguments": "", "status": "in_progress"})
                out += self._call_delta(call, call.arguments)
            out += self._event(
                "response.function_call_arguments.done",
                **self._place(item["id"]),
                name=item["name"],
                arguments=call.arguments,
            )
            return out + self._done(item)
        return self._added({**item, "status": "in_progress"}) + self._done(item)

    # Items, events, the response object.

    @property
    def _at(self) -> int:
        return len(self._items)

    def _place(self, identity: str) -> Json:
        return {"item_id": identity, "output_index": self._at}

    def _close(self, status: str) -> bytes:
        now, out = self._open, b""
        if isinstance(now, _OpenText):
            out = self._close_text(now, status)
        elif now is not None:
            out = self._close_call(now, status)
        self._open = None
        return out

    def _added(self, item: Json) -> bytes:
        return self._event("response.output_item.added", output_index=self._at, item=item)

    def _done(self, item: Json) -> bytes:
        out = self._event("response.output_item.done", output_index=self._at, item=item)
        self._items.append(item)
        return out

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        response = self._object.of("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


class _OpenText:
    def __init__(self, kind: str, identity: str) -> None:
        self.kind = kind
        self.id = identity
        self.said: list[str] = []


class _OpenCall:
    """A tool call as far as it was heard; `told` once its item was added."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments = ""
        self.kind = "function"
        self.item_id = ""
        self.told = False
        self.decoder = CustomInputDecoder()

    def call(self, arguments: str) -> ToolCall:
        return ToolCall(self.id, self.name, arguments)

    @property
    def whole(self) -> bool:
        """The arguments are a complete object, so nothing can follow."""
        try:
            return isinstance(orjson.loads(self.arguments), dict)
        except orjson.JSONDecodeError:
            return False
