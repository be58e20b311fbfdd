"""The stand-in for Google's API."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from google.genai import types as google
from pydantic import ValidationError

from tests.fakes.engine_server import Json, sse
from tests.fakes.providers.base import Malformed, Provider, Refused, Scripted

_CONTENT_FIELDS = {"contents": google.Content, "tools": google.Tool, "safetySettings": google.SafetySetting}


class GoogleProvider(Provider):
    """The GenerateContent API. Function calls are signed, and must come back with their signatures."""

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
