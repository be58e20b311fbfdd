"""A fake of the strictest OpenAI-compatible APIs: it refuses every undocumented field and returns no token ids."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from tests.fakes.engine_server import Json
from tests.fakes.vllm_server import FakeVllm, error

_BODY = {
    *("model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "presence_penalty", "frequency_penalty"),
    *("n", "stop", "logit_bias", "stream", "stream_options"),
}
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id"}


@dataclass
class StrictApi(FakeVllm):
    newer_limit: bool = False
    """Accepts the token limit as `max_completion_tokens` only, like OpenAI's reasoning models."""
    wants_reasoning: bool = False
    """Refuses a request in which an earlier answer lacks its reasoning."""
    retry_after: str | None = None
    """The `retry-after` header of refusals."""
    lists_models: bool = True

    def plain(self, path: str, body: Json) -> tuple[int, Json]:
        known = path.endswith("/models") and self.lists_models
        return super().plain("/v1/models", body) if known else (404, {"detail": "Not Found"})

    def refusal(self, path: str, body: Json) -> Json | None:
        if unknown := body.keys() - _BODY:
            return error(f"Unrecognized request argument supplied: {min(unknown)}", 400, min(unknown))
        if self.newer_limit and "max_tokens" in body:
            text = "Unsupported parameter: 'max_tokens' is not supported with this model. "
            return error(text + "Use 'max_completion_tokens' instead.", 400, "max_tokens")
        for message in body.get("messages", ()):
            allowed = _MESSAGE | ({"reasoning_content"} if self.wants_reasoning else set())
            if unknown := message.keys() - allowed:
                return error(f"Additional properties are not allowed ({min(unknown)!r})", 400, "messages")
            if self.wants_reasoning and message["role"] == "assistant" and "reasoning_content" not in message:
                return error("Missing `reasoning_content` field in the assistant message", 400, None)
        return super().refusal(path, body)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        answer = await super().serve(request)
        if answer.status >= 400 and self.retry_after is not None:
            answer.headers["retry-after"] = self.retry_after
        return answer
