"""Base classes of the engines that call a provider's API: send one request, decode its answer to events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, ClassVar

from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.hosted.carried import not_carried
from polar_proxy.engines.hosted.errors import hosted_error
from polar_proxy.engines.hosted.token_counts import TokenCounter, request_text
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.openai_client import AnswerDecoder, OpenAIClient, ServerEngine
from polar_proxy.errors import EngineDroppedError, EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, Usage

CONTEXT_LENGTH = 128_000
"""Context length in tokens that is reported to harnesses if the API does not state the model's context length."""


def hosted_info(
    engine: str, version: str, model: str, context_length: int = CONTEXT_LENGTH, *capabilities: str
) -> EngineInfo:
    """Return the description of a provider's model. `capabilities` are added to the capabilities that
    all providers have."""
    return EngineInfo(
        engine=engine,
        version=version,
        model=model,
        context_length=context_length,
        template_hash=None,
        logprob_mode="raw",
        capabilities=frozenset({"tools", "json_schema", "tool_choice_required", "images", "hosted", *capabilities}),
    )


class HostedEngine(ServerEngine):
    """An engine that calls a provider's API."""

    provider: ClassVar[str]

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        auth: tuple[str, str] = ("authorization", "Bearer "),
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.client = OpenAIClient(url, api_key, auth=auth, headers=headers, read_error=hosted_error)
        self._counter = TokenCounter()

    @abstractmethod
    def _encode(self, request: EngineRequest, stream: bool) -> tuple[str, Json]:
        """Return the path below the server's root, and the body.

        Raises RequestError for a request that the provider's format cannot express.
        """

    def _headers(self, request: EngineRequest) -> bytes:
        """Return further header fields for this request, each with its line break."""
        return b""

    @abstractmethod
    def _decoder(self, request: EngineRequest) -> AnswerDecoder:
        """Return a new decoder of one answer."""

    async def _connect_error(self, response: HttpResponse) -> EngineError:
        """Return the error to raise if the request for the model's description fails with `response`."""
        failure = await self.client.failure(response)
        return failure if isinstance(failure, EngineError) else EngineError(f"{self.client.name}: {failure}")

    def not_carried(self, request: EngineRequest) -> tuple[str, ...]:
        return not_carried(request, self.provider)

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """Generate an answer, whose events carry no token ids.

        Log-probabilities are not requested even if the client wants them: without token ids they cannot be assigned to
        tokens. If the provider does not count the tokens, the last event has Polar's estimate.
        """
        decoder = self._decoder(request)
        try:
            response = await self._start(request, stream)
        except EngineDroppedError as error:  # which the gateway would answer by a second request
            raise EngineError(str(error)) from error
        usage: Usage | None = None
        sampled: list[str] = []
        async with aclosing(self.client.events(response, decoder, stream=stream)) as steps:
            async for events in steps:
                for event in events:
                    usage = event.usage or usage
                    sampled += [event.text, event.reasoning, *(call.arguments for call in event.tool_calls)]
                    yield event
        if usage is None:
            yield SampleEvent(usage=await self._estimate(request, "".join(sampled)))

    async def _start(self, request: EngineRequest, stream: bool) -> HttpResponse:
        path, body = await self.client.thread.run(request.large, self._encode, request, stream)
        return await self.client.post(path, body, large=request.large, fields=self._headers(request))

    async def _estimate(self, request: EngineRequest, answer: str) -> Usage:
        model = self.info.model
        prompt = await asyncio.to_thread(self._counter.count, model, request_text(request))
        sampled = await asyncio.to_thread(self._counter.count, model, answer)
        return Usage(prompt, sampled, model=model, estimated=True)

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        raise RequestError(f"{self.client.name} does not return a prompt's tokens.", status=501, code="unsupported")

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        raise RequestError(f"{self.client.name} does not accept token ids.", status=501, code="unsupported")

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens as tiktoken counts them. If tiktoken does not know the model, return an
        estimate from the number of bytes."""
        return await asyncio.to_thread(self._counter.count, self.info.model, request_text(request))

    async def health(self) -> str | None:
        try:
            await self._connect()
        except (EngineError, RequestError) as error:
            return str(error)
        return None


class HostedDecoder(ABC):
    """Base class of the decoders of a provider's answers, whole or streamed."""

    def __init__(self, name: str) -> None:
        """`name`: the server's name in error texts."""
        self._name = name

    def feed(self, chunks: Any) -> list[SampleEvent]:
        """Return the events of the next chunks of the answer. Raises EngineError for chunks in an unknown format."""
        try:
            return [event for chunk in chunks for event in self.events(chunk)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._name} sent an answer in an unknown format: {error!r}.") from error

    @abstractmethod
    def events(self, chunk: Json) -> list[SampleEvent]:
        """Return the events of one chunk. Raises KeyError, TypeError, ... for missing or wrong fields."""
