"""Stand-ins for the APIs of OpenAI, Anthropic and Google: they validate requests by the types of the official SDKs.

A request that the SDK's types do not describe, or without the right key, is refused. Scripted answers are built with
the SDK's own response models. `Signed` answers of Anthropic and Google must come back with their signatures in the next
request that has the result of their tool call, as the real APIs demand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from aiohttp import web
from anthropic import types as anthropic
from anthropic.types import message_count_tokens_params, message_create_params
from google.genai import types as google
from openai.types import chat
from openai.types import completion_create_params as openai_text
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as openai_chat
from openai.types.chat.chat_completion_content_part_param import File
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.fakes.engine_server import FakeServer, Json, sse

KEY = "provider-key-7f3a"
"""The only key that the stand-ins accept."""


@dataclass
class Scripted:
    """An answer of a provider's model."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Json], ...] = ()
    """(name, arguments) of each tool call."""
    finish: str = "stop"
    """stop, length, filter or stop_sequence."""
    input_tokens: int = 100
    output_tokens: int = 20
    cached: int = 30
    written: int = 0
    thinking_tokens: int = 5
    counts: bool = True
    """Whether it reports the tokens."""
    cut: bool = False
    """The stream breaks off before its end."""
    error_in_stream: bool = False


@dataclass
class Refused:
    """An error, in the provider's own form."""

    status: int
    message: str = "refused"
    kind: str = "overloaded_error"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: str | None = None
    """Google's RetryInfo."""


class Malformed(Exception):
    """A request that the SDK's types do not describe."""


def _exhaust(value: Any) -> None:
    """Validate the items of iterables too, which pydantic does only when they are read."""
    if isinstance(value, Mapping):
        for inner in value.values():
            _exhaust(inner)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes | BaseModel):
        for inner in value:
            _exhaust(inner)


def check(kind: Any, value: Json) -> None:
    """Raise Malformed unless the TypedDict `kind` describes the value and has all of its fields."""
    known = {name for one in get_args(kind) or (kind,) for name in get_type_hints(one)}
    if unknown := value.keys() - known:
        raise Malformed(f"unknown field {min(unknown)!r}")
    try:
        _exhaust(TypeAdapter(kind).validate_python(value))
    except ValidationError as error:
        raise Malformed(str(error)) from error


class Provider(FakeServer):
    model = "stand-in"

    def __init__(self) -> None:
        self.__post_init__()
        self.headers: list[Mapping[str, str]] = []
        self.model_of: Callable[[Json], Scripted] = lambda body: Scripted("Hello.")
        """Answers requests for which nothing is scripted."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if KEY not in self.key(request):
            return self.refusal(Refused(401, f"the key {self.key(request)} is wrong", "authentication_error"))
        if request.method == "GET":
            return self.card(request.path)
        body = await request.json()
        try:
            self.validate(request.path, body)
        except Malformed as error:
            return self.refusal(Refused(400, str(error), "invalid_request_error"))
        if self.counts(request.path):
            return web.json_response(self.count())
        self.bodies.append(body)
        answer = self.scripted.popleft() if self.scripted else self.model_of(body)
        if isinstance(answer, Refused):
            return self.refusal(answer)
        if not self.streams(request, body):
            return web.json_response(self.whole(answer, len(self.bodies)))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.stream(answer, len(self.bodies)):
            await response.write(event)
        if answer.cut and request.transport is not None:
            request.transport.abort()
        return response

    def key(self, request: web.Request) -> str:
        raise NotImplementedError

    def card(self, path: str) -> web.Response:
        raise NotImplementedError

    def validate(self, path: str, body: Json) -> None:
        raise NotImplementedError

    def counts(self, path: str) -> bool:
        return False

    def count(self) -> Json:
        raise NotImplementedError

    def streams(self, request: web.Request, body: Json) -> bool:
        return bool(body.get("stream"))

    def whole(self, answer: Scripted, number: int) -> Json:
        raise NotImplementedError

    def stream(self, answer: Scripted, number: int) -> Iterable[bytes]:
        raise NotImplementedError

    def refusal(self, error: Refused) -> web.Response:
        raise NotImplementedError


_ROLES = {
    "system": chat.ChatCompletionSystemMessageParam,
    "developer": chat.ChatCompletionDeveloperMessageParam,
    "user": chat.ChatCompletionUserMessageParam,
    "assistant": chat.ChatCompletionAssistantMessageParam,
    "tool": chat.ChatCompletionToolMessageParam,
}
_PARTS = {
    "text": chat.ChatCompletionContentPartTextParam,
    "image_url": chat.ChatCompletionContentPartImageParam,
    "input_audio": chat.ChatCompletionContentPartInputAudioParam,
    "file": File,
}


class OpenAIProvider(Provider):
    """Chat Completions and Completions. Its model keeps its reasoning to itself."""

    model = "gpt-4.1-2025-04-14"

    def key(self, request: web.Request) -> str:
        return request.headers.get("authorization", "")

    def card(self, path: str) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model", "created": 1}]})

    def validate(self, path: str, body: Json) -> None:
        kinds = {
            "/v1/chat/completions": (
                openai_chat.CompletionCreateParamsStreaming,
                openai_chat.CompletionCreateParamsNonStreaming,
            ),
            "/v1/completions": (
                openai_text.CompletionCreateParamsStreaming,
                openai_text.CompletionCreateParamsNonStreaming,
            ),
        }
        if path not in kinds:
            raise Malformed(f"no route {path}")
        kind = kinds[path][0 if body.get("stream") else 1]
        if "prompt" in body:
            check(kind, body)
            return
        check(kind, {**body, "messages": []})
        for message in body["messages"]:
            parts = message.get("content")
            check(_ROLES[message["role"]], {**message, "content": ""} if isinstance(parts, list) else message)
            for part in parts if isinstance(parts, list) else ():
                if message["role"] != "user" and part["type"] != "text":
                    raise Malformed(f"a part of type {part['type']} in a message of the role {message['role']}")
                check(_PARTS[part["type"]], part)

    def _usage(self, answer: Scripted) -> Json:
        return {
            "prompt_tokens": answer.input_tokens,
            "completion_tokens": answer.output_tokens,
            "total_tokens": answer.input_tokens + answer.output_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached},
            "completion_tokens_details": {"reasoning_tokens": answer.thinking_tokens},
        }

    def _calls(self, answer: Scripted, number: int) -> list[Json]:
        return [
            {"id": f"call_{number}_{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for i, (n, a) in enumerate(answer.calls)
        ]

    def _finish(self, answer: Scripted) -> str:
        if answer.calls:
            return "tool_calls"
        return {"length": "length", "filter": "content_filter"}.get(answer.finish, "stop")

    def whole(self, answer: Scripted, number: int) -> Json:
        head: Json = {"id": f"chatcmpl-{number}", "created": 1, "model": self.model}
        usage = {"usage": self._usage(answer)} if answer.counts else {}
        if "prompt" in self.bodies[-1]:
            choice: Json = {"index": 0, "text": answer.text, "finish_reason": self._finish(answer), "logprobs": None}
            return {**head, "object": "text_completion", "choices": [choice], **usage}
        message = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.calls:
            message["tool_calls"] = self._calls(answer, number)  # type: ignore[assignment]
        choice = {"index": 0, "message": message, "finish_reason": self._finish(answer), "logprobs": None}
        body = {**head, "object": "chat.completion", "choices": [choice], **usage}
        ChatCompletion.model_validate(body)
        return body

    def stream(self, answer: Scripted, number: int) -> Iterable[bytes]:
        text = "prompt" in self.bodies[-1]
        kind = "text_completion" if text else "chat.completion.chunk"
        head: Json = {"id": f"chatcmpl-{number}", "object": kind, "created": 1, "model": self.model}

        def chunk(content: Json, finish: str | None = None) -> bytes:
            body = {**head, "choices": [{"index": 0, **content, "finish_reason": finish, "logprobs": None}]}
            if not text:
                ChatCompletionChunk.model_validate(body)
            return sse(body)

        for piece in (answer.text[:3], answer.text[3:]):
            yield chunk({"text": piece} if text else {"delta": {"role": "assistant", "content": piece}})
        if answer.error_in_stream:
            yield sse({"error": {"message": "provider is overloaded", "type": "server_error", "code": 503}})
            return
        for i, call in enumerate(self._calls(answer, number)):
            function = call["function"]
            first = {"index": i, **call, "function": {"name": function["name"], "arguments": ""}}
            yield chunk({"delta": {"tool_calls": [first]}})
            for piece in (function["arguments"][:5], function["arguments"][5:]):
                yield chunk({"delta": {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}})
        if answer.cut:
            return
        yield chunk({"text": ""} if text else {"delta": {}}, self._finish(answer))
        if answer.counts:
            yield sse({**head, "choices": [], "usage": self._usage(answer)})
        yield b"data: [DONE]\n\n"

    def refusal(self, error: Refused) -> web.Response:
        body = {"error": {"message": error.message, "type": error.kind, "param": None, "code": error.kind}}
        return web.json_response(body, status=error.status, headers=error.headers)


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
    """Messages. Its answers with tool calls have signed thinking, which must come back with the result."""

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


_CONTENT_FIELDS = {"contents": google.Content, "tools": google.Tool, "safetySettings": google.SafetySetting}


class GoogleProvider(Provider):
    """GenerateContent. Its function calls are signed, and must come back with their signatures."""

    model = "gemini-2.5-pro"

    def key(self, request: web.Request) -> str:
        return request.headers.get("x-goog-api-key", "")

    def card(self, path: str) -> web.Response:
        if not path.endswith("/" + self.model):
            return self.refusal(Refused(404, f"{path} is not found", "NOT_FOUND"))
        return web.json_response({"name": f"models/{self.model}", "inputTokenLimit": 1_048_576})

    def counts(self, path: str) -> bool:
        return path.endswith(":countTokens")

    def count(self) -> Json:
        return {"totalTokens": 4321}

    def streams(self, request: web.Request, body: Json) -> bool:
        return request.path.endswith(":streamGenerateContent") and request.query.get("alt") == "sse"

    def validate(self, path: str, body: Json) -> None:
        if self.counts(path):
            body = body["generateContentRequest"]
        known = {*_CONTENT_FIELDS, "systemInstruction", "toolConfig", "generationConfig", "labels", "serviceTier"}
        if unknown := body.keys() - known - {"model"}:
            raise Malformed(f"Unknown name {min(unknown)!r}")
        try:
            for name, kind in _CONTENT_FIELDS.items():
                for item in body.get(name, ()):
                    kind.model_validate(item)
            google.Content.model_validate(body.get("systemInstruction", {}))
            google.ToolConfig.model_validate(body.get("toolConfig", {}))
            google.GenerationConfig.model_validate(body.get("generationConfig", {}))
        except ValidationError as error:
            raise Malformed(str(error)) from error
        for content in body["contents"]:
            for part in content["parts"]:
                call = part.get("functionCall")
                made_here = call is not None and call.get("id", "").startswith("fc_")
                if made_here and part.get("thoughtSignature") != _signature(call["id"]):
                    raise Malformed(f"Function call {call['name']} is missing a thought_signature")

    def _parts(self, answer: Scripted, number: int) -> list[Json]:
        parts: list[Json] = [{"text": answer.reasoning, "thought": True}] if answer.reasoning else []
        if answer.text:
            parts.append({"text": answer.text})
        for i, (name, arguments) in enumerate(answer.calls):
            call_id = f"fc_{number}_{i}"
            call = {"id": call_id, "name": name, "args": arguments}
            parts.append({"functionCall": call, "thoughtSignature": _signature(call_id)})
        return parts

    def _response(self, answer: Scripted, parts: list[Json], *, last: bool) -> Json:
        finish = {"length": "MAX_TOKENS", "filter": "SAFETY"}.get(answer.finish, "STOP")
        candidate: Json = {"content": {"role": "model", "parts": parts}, "index": 0}
        if last:
            candidate["finishReason"] = finish
        body: Json = {"candidates": [candidate], "modelVersion": self.model, "responseId": "r"}
        if answer.counts:
            body["usageMetadata"] = {
                "promptTokenCount": answer.input_tokens,
                "cachedContentTokenCount": answer.cached,
                "candidatesTokenCount": answer.output_tokens - answer.thinking_tokens,
                "thoughtsTokenCount": answer.thinking_tokens,
                "totalTokenCount": answer.input_tokens + answer.output_tokens,
            }
        google.GenerateContentResponse.model_validate(body)
        return body

    def whole(self, answer: Scripted, number: int) -> Json:
        return self._response(answer, self._parts(answer, number), last=True)

    def stream(self, answer: Scripted, number: int) -> Iterable[bytes]:
        parts = self._parts(answer, number)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if answer.cut and last:
                return
            body = self._response(answer, [part], last=last and not answer.error_in_stream)
            yield sse(body).replace(b"\n\n", b"\r\n\r\n")
        if answer.error_in_stream:
            yield sse({"error": {"code": 503, "message": "provider is overloaded", "status": "UNAVAILABLE"}})

    def refusal(self, error: Refused) -> web.Response:
        detail: Json = {"code": error.status, "message": error.message, "status": error.kind.upper()}
        if error.delay is not None:
            info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": error.delay}
            detail["details"] = [info]
        return web.json_response({"error": detail}, status=error.status, headers=error.headers)


def _signature(call_id: str) -> str:
    return f"c2ln{call_id.encode().hex()}"  # base64 of the bytes that the SDK's type has
