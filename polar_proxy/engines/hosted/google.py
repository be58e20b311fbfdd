"""`google`: Google's Gemini API. Source: https://ai.google.dev/api"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar
from urllib.parse import quote

import orjson

from polar_proxy.engines.hosted.base import CONTEXT_LENGTH, HostedDecoder, HostedEngine, hosted_info
from polar_proxy.engines.hosted.content import SYSTEM
from polar_proxy.engines.hosted.errors import stream_error
from polar_proxy.engines.hosted.google_request import google_body, google_prompt
from polar_proxy.engines.openai_client import AnswerDecoder
from polar_proxy.engines.openai_stream import parse_json
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import (
    ChatRequest,
    EngineInfo,
    EngineRequest,
    Json,
    ProviderTurn,
    SampleEvent,
    ToolDelta,
    Usage,
    new_id,
)

GOOGLE_URL = "https://generativelanguage.googleapis.com"
_API = "v1beta"
_FILTERED = frozenset(
    {"SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "MODEL_ARMOR"}
    | {"IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION"}
)
_STANDARD_TRAFFIC = (None, "ON_DEMAND", "TRAFFIC_TYPE_UNSPECIFIED")


class GoogleEngine(HostedEngine):
    """A model of Google's API: `async with GoogleEngine(model="gemini-...", api_key="...") as engine:`.

    `url` is the API's root, with or without the version. Entering the `async with` block raises EngineError if the API
    cannot be reached, refuses the key, or does not serve the model.
    """

    provider: ClassVar[str] = "google"

    def __init__(self, url: str = GOOGLE_URL, *, model: str, api_key: str | None = None) -> None:
        super().__init__(url.rstrip("/").removesuffix(f"/{_API}"), api_key=api_key, auth=("x-goog-api-key", ""))
        self._model = model.removeprefix("models/")
        self._path = f"/{_API}/models/{quote(self._model, safe='')}"

    async def _connect(self) -> EngineInfo:
        response = await self.client.send("GET", self._path)
        if response.status != 200:
            raise await self._connect_error(response)
        card = parse_json(await self.client.read(response), self.client.url)
        length = card.get("inputTokenLimit") or CONTEXT_LENGTH
        return hosted_info("google", _API, self._model, length, "signed_answers")

    def not_carried(self, request: EngineRequest) -> tuple[str, ...]:
        names = set(super().not_carried(request))
        if isinstance(request, ChatRequest):
            roles = [message.role in SYSTEM for message in request.messages]
            if any(not before and now for before, now in pairwise(roles)):
                names.add("messages.system")
        return tuple(sorted(names))

    def _encode(self, request: EngineRequest, stream: bool) -> tuple[str, Json]:
        if not isinstance(request, ChatRequest):
            raise RequestError(
                "Google has no raw completions: send a chat request.", param="prompt", code="unsupported_parameter"
            )
        verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"{self._path}:{verb}", google_body(request, self._model)

    def _decoder(self, request: EngineRequest) -> AnswerDecoder:
        return ContentDecoder(self.client.name, self._model, request.sampling.n)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens as the provider counts them."""
        prompt = await self.client.thread.run(request.large, google_prompt, request)
        body = {"generateContentRequest": {"model": f"models/{self._model}", **prompt}}
        return int((await self.client.json("POST", f"{self._path}:countTokens", body))["totalTokens"])


@dataclass(slots=True)
class _Candidate:
    parts: list[Json] = field(default_factory=list)
    calls: int = 0
    finish: str | None = None


class ContentDecoder(HostedDecoder):
    """Turns GenerateContentResponse objects, whole or streamed, into events."""

    def __init__(self, name: str, model: str, candidates: int = 1) -> None:
        """`name`: the server's name in error texts. `model`: the model that was requested."""
        super().__init__(name)
        self._model = model
        self._candidates = {index: _Candidate() for index in range(candidates)}
        self._usage: Usage | None = None

    def end(self) -> list[SampleEvent]:
        return [self._finish(index, candidate) for index, candidate in self._candidates.items()]

    def events(self, chunk: Json) -> list[SampleEvent]:
        if "error" in chunk:
            raise stream_error(chunk["error"], self._name)
        self._model = chunk.get("modelVersion") or self._model
        if usage := chunk.get("usageMetadata"):
            self._usage = google_usage(usage, self._model)
        if (chunk.get("promptFeedback") or {}).get("blockReason"):
            for candidate in self._candidates.values():
                candidate.finish = candidate.finish or "SAFETY"
        events = []
        for given in chunk.get("candidates") or ():
            index = given.get("index", 0)
            candidate = self._candidates[index]
            candidate.finish = given.get("finishReason") or candidate.finish
            for part in (given.get("content") or {}).get("parts") or ():
                events.append(self._part(index, candidate, part))
        return events

    def _part(self, index: int, candidate: _Candidate, part: Json) -> SampleEvent:
        candidate.parts.append(part)
        usage = self._usage
        if call := part.get("functionCall"):
            # The id goes into the kept part too, by which the signature is found again.
            call["id"] = call.get("id") or new_id("call")
            arguments = orjson.dumps(call.get("args") or {}).decode()
            delta = ToolDelta(candidate.calls, call["id"], call["name"], arguments)
            candidate.calls += 1
            return SampleEvent(index, tool_calls=(delta,), usage=usage)
        text = part.get("text")
        if text is None:
            kinds = ", ".join(sorted(part.keys() - {"thoughtSignature"}))
            raise EngineError(f"{self._name} answered with {kinds!r:.80}, which Polar cannot pass on to the agent.")
        return SampleEvent(index, usage=usage, **{"reasoning" if part.get("thought") else "text": text})

    def _finish(self, index: int, candidate: _Candidate) -> SampleEvent:
        reason = candidate.finish
        if reason is None:
            raise EngineError(f"{self._name} broke off in the middle of its answer.")
        if reason in _FILTERED:
            finish = "content_filter"
        elif reason == "MAX_TOKENS":
            finish = "length"
        elif reason == "STOP":
            finish = "tool_calls" if candidate.calls else "stop"
        else:  # MALFORMED_FUNCTION_CALL, MISSING_THOUGHT_SIGNATURE, OTHER, ...: there is no answer
            raise EngineError(f"{self._name} ended its answer with {reason!r:.80}: the model failed. Try again.")
        signed = any("thoughtSignature" in part for part in candidate.parts)
        return SampleEvent(
            index,
            finish_reason=finish,
            usage=self._usage,
            provider_turn=ProviderTurn("google", tuple(candidate.parts)) if signed else None,
        )


def google_usage(usage: Json, model: str) -> Usage | None:
    """Return the token counts; None if the provider did not report them.

    `output_tokens` includes the tokens of thoughts, which Google counts separately.
    """
    prompt = usage.get("promptTokenCount")
    if not isinstance(prompt, int):
        return None
    thoughts = usage.get("thoughtsTokenCount")
    tier = usage.get("trafficType")
    return Usage(
        input_tokens=prompt + (usage.get("toolUsePromptTokenCount") or 0),
        output_tokens=(usage.get("candidatesTokenCount") or 0) + (thoughts or 0),
        cached_tokens=usage.get("cachedContentTokenCount"),
        reasoning_tokens=thoughts,
        model=model,
        service_tier=None if tier in _STANDARD_TRAFFIC else str(tier),
    )
