"""The stand-in for OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterable

from aiohttp import web
from openai.types import chat
from openai.types import completion_create_params as openai_text
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as openai_chat
from openai.types.chat.chat_completion_content_part_param import File

from tests.fakes.engine_server import Json, sse
from tests.fakes.providers.base import Malformed, Provider, Refused, Scripted, check

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
    """The Chat Completions and Completions APIs. The model does not show its reasoning."""

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
