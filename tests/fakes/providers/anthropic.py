"""The stand-in for Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web
from anthropic import types as anthropic
from anthropic.types import message_count_tokens_params, message_create_params

from tests.fakes.engine_server import Json, sse
from tests.fakes.providers.base import Malformed, Provider, Refused, Scripted, check

_BLOCKS = {
    "text": anthropic.TextBlockParam,
    "image": anthropic.ImageBlockParam,
    "document": anthropic.DocumentBlockParam,
    "thinking": anthropic.ThinkingBlockParam,
    "redacted_thinking": anthropic.RedactedThinkingBlockParam,
    "tool_use": anthropic.ToolUseBlockParam,
    "tool_result": anthropic.ToolResultBlockParam,
}


_SOURCES = {
    "base64": anthropic.Base64ImageSourceParam | anthropic.Base64PDFSourceParam,
    "url": anthropic.URLImageSourceParam | anthropic.URLPDFSourceParam,
    "text": anthropic.PlainTextSourceParam,
}
_TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": ""}
_PLAIN: Mapping[str, Json] = {
    "tool_result": {"content": ""},
    "document": {"source": _TEXT_SOURCE},
    "image": {"source": {"type": "url", "url": ""}},
}
"""Stands in for the recursive fields of a block, which are checked by themselves."""


def check_messages_body(kind: Any, body: Json) -> None:
    """Do as `check`, but block by block: pydantic 2.14 panics on unions in the items of nested iterables."""
    check(kind, {**body, "messages": [], "system": "", "tools": []})
    for tool in body.get("tools", ()):
        check(anthropic.ToolParam, tool)
    blocks = list(body.get("system", ()))
    for message in body["messages"]:
        if message.keys() != {"role", "content"} or message["role"] not in ("user", "assistant", "system"):
            raise Malformed(f"a message of the form {sorted(message)}")
        blocks += message["content"]
    for block in blocks:
        if block["type"] not in _BLOCKS:
            raise Malformed(f"a block of the type {block['type']!r}")
        for part in (block, *block.get("content", ())):
            source = part.get("source")
            if source is not None:
                check(_SOURCES[source["type"]], source)
            check(_BLOCKS[part["type"]], {**part, **_PLAIN.get(part["type"], {})})
        if block["type"] == "text" and not block["text"].strip():
            raise Malformed("text content blocks must contain non-whitespace text")


class AnthropicProvider(Provider):
    """The Messages API. Answers with tool calls have signed thinking, which must come back with the result."""

    model = "claude-sonnet-4-5-20250929"

    def key(self, request: web.Request) -> str:
        return request.headers.get("x-api-key", "")

    def card(self, path: str) -> web.Response:
        if not path.endswith("/" + self.model):
            return self.refusal(Refused(404, f"model: {path}", "not_found_error"))
        return web.json_response({"id": self.model, "type": "model", "max_tokens": 64_000, "max_input_tokens": 200_000})

    def counts(self, path: str) -> bool:
        return path.endswith("/count_tokens")

    def count(self) -> Json:
        return {"input_tokens": 4321}

    def validate(self, path: str, body: Json) -> None:
        if self.counts(path):
            check_messages_body(message_count_tokens_params.MessageCountTokensParams, body)
            return
        if path != "/v1/messages":
            raise Malformed(f"no route {path}")
        streaming = message_create_params.MessageCreateParamsStreaming
        whole = message_create_params.MessageCreateParamsNonStreaming
        check_messages_body(streaming if body.get("stream") else whole, body)
        messages = body["messages"]
        if messages[0]["role"] != "user":
            raise Malformed("the first message must be the user's")
        results = [b for b in messages[-1]["content"] if b["type"] == "tool_result"]
        if results and self._signatures():
            thinking = [b for b in messages[-2]["content"] if b["type"] == "thinking"]
            if [b["signature"] for b in thinking] != self._signatures()[-1:]:
                raise Malformed("Expected `thinking`, but found `tool_use`: the signature is missing")

    def _signatures(self) -> list[str]:
        return [f"signature-{number}" for number, signed in enumerate(self.signed, 1) if signed]

    def __init__(self) -> None:
        super().__init__()
        self.signed: list[bool] = []
        """Whether each answer so far had signed thinking."""

    def _blocks(self, answer: Scripted, number: int) -> list[Json]:
        blocks: list[Json] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": f"signature-{number}"})
        if answer.text:
            blocks.append({"type": "text", "text": answer.text})
        blocks += [
            {"type": "tool_use", "id": f"toolu_{number}_{i}", "name": name, "input": arguments}
            for i, (name, arguments) in enumerate(answer.calls)
        ]
        self.signed.append(bool(answer.reasoning))
        return blocks

    def _stop(self, answer: Scripted) -> str:
        if answer.calls:
            return "tool_use"
        return {"length": "max_tokens", "filter": "refusal", "stop_sequence": "stop_sequence"}.get(
            answer.finish, "end_turn"
        )

    def _message(self, answer: Scripted, number: int, blocks: list[Json], stop: str | None) -> Json:
        usage = {
            "input_tokens": answer.input_tokens - answer.cached - answer.written,
            "output_tokens": answer.output_tokens,
            "cache_read_input_tokens": answer.cached,
            "cache_creation_input_tokens": answer.written,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": answer.written},
            "output_tokens_details": {"thinking_tokens": answer.thinking_tokens},
            "service_tier": "standard",
        }
        body = {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": stop,
            "stop_sequence": "END" if stop == "stop_sequence" else None,
            "usage": usage,
        }
        anthropic.Message.model_validate(body)
        return body

    def whole(self, answer: Scripted, number: int) -> Json:
        return self._message(answer, number, self._blocks(answer, number), self._stop(answer))

    def stream(self, answer: Scripted, number: int) -> Iterable[bytes]:
        def event(kind: str, **fields: Any) -> bytes:
            return f"event: {kind}\n".encode() + sse({"type": kind, **fields})

        blocks = self._blocks(answer, number)
        message = self._message(answer, number, [], None)
        message["usage"]["output_tokens"] = 1
        yield event("message_start", message=message)
        yield event("ping")
        for index, block in enumerate(blocks):
            empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}
            yield event("content_block_start", index=index, content_block={**block, **empty[block["type"]]})
            for delta in _deltas(block):
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
            if answer.error_in_stream:
                yield event("error", error={"type": "overloaded_error", "message": "provider is overloaded"})
                return
        if answer.cut:
            return
        stop = self._stop(answer)
        delta = {"stop_reason": stop, "stop_sequence": "END" if stop == "stop_sequence" else None}
        usage = {"output_tokens": answer.output_tokens} | {
            "output_tokens_details": {"thinking_tokens": answer.thinking_tokens}
        }
        yield event("message_delta", delta=delta, usage=usage)
        yield event("message_stop")

    def refusal(self, error: Refused) -> web.Response:
        body = {"type": "error", "error": {"type": error.kind, "message": error.message}, "request_id": "req_1"}
        return web.json_response(body, status=error.status, headers=error.headers)


def _deltas(block: Json) -> Iterable[Json]:
    if block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "text":
        yield {"type": "text_delta", "text": block["text"][:3]}
        yield {"type": "text_delta", "text": block["text"][3:]}
    elif block["input"]:
        arguments = json.dumps(block["input"])
        yield {"type": "input_json_delta", "partial_json": arguments[:5]}
        yield {"type": "input_json_delta", "partial_json": arguments[5:]}
