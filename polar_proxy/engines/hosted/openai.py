"""`openai`: OpenAI's API, or any other API with a compatible chat route.

A parameter is sent only if the client set it and OpenAI documents it, because strict APIs refuse a request that has an
unknown field. Options that steer OpenAI's own service (`carried.py`) go to OpenAI's and Azure's hosts only. Some APIs
need a field of `_FALLBACK_FIELDS`. The engine sends requests without these fields at first. If an API refuses a request
and names such a field, the engine repeats the request with the field, and uses the field from then on.

On this route, OpenAI's models do not return their reasoning. They return only the number of reasoning tokens.
"""

from __future__ import annotations

from collections.abc import Set
from typing import ClassVar
from urllib.parse import urlsplit

from polar_proxy.engines.hosted.base import CONTEXT_LENGTH, HostedEngine, hosted_info
from polar_proxy.engines.hosted.openai_request import chat_fields
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.openai_client import AnswerDecoder, sampling_fields
from polar_proxy.engines.openai_stream import ChunkDecoder, parse_json
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, TextRequest

OPENAI_URL = "https://api.openai.com/v1"
_OWN_HOSTS = ("api.openai.com", ".openai.azure.com")
_LENGTH_FIELDS = ("context_length", "context_window", "max_context_length", "max_model_len")
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_FALLBACK_FIELDS = ("max_completion_tokens", "reasoning_content")
"""Fields that are sent only after a refusal has named them. OpenAI's reasoning models accept the token limit only as
`max_completion_tokens`; some models require the reasoning of earlier answers, in a field that most APIs do not know."""


class OpenAIEngine(HostedEngine):
    """A model of OpenAI's API or a compatible one: `async with OpenAIEngine("https://HOST/v1", model="m",
    api_key="...")`.

    `url` is the API's root, with or without `/v1`; a root with another path is used as it is. `model` may be left out
    if the API serves one model. Entering raises EngineError if the API cannot be reached or refuses the key, or if
    `model` is needed and was left out.
    """

    provider: ClassVar[str] = "openai"

    def __init__(
        self,
        url: str = OPENAI_URL,
        *,
        model: str | None = None,
        api_key: str | None = None,
        official: bool | None = None,
    ) -> None:
        """`official`: whether the API is OpenAI's own, or forwards to it. Default: true for OpenAI's and Azure's
        hosts."""
        super().__init__(url, api_key=api_key)
        parts = urlsplit(self.client.url)
        self._root = "/v1" if url.rstrip("/").endswith("/v1") or not parts.path.strip("/") else ""
        self._official = (parts.hostname or "").endswith(_OWN_HOSTS) if official is None else official
        self._requested_model = model
        self._fallback_fields: set[str] = set()
        """The members of `_FALLBACK_FIELDS` that this API was found to need."""

    async def _connect(self) -> EngineInfo:
        served = await self._list_models()
        model = self._requested_model
        if model is None:
            if served is None or len(served) != 1:
                problem = "does not list its models" if served is None else f"serves {len(served)} models"
                raise EngineError(f"{self.client.name} {problem}: name one with --model.")
            model = next(iter(served))
        # A model that is not listed may still be served (an alias, a fine-tuned one): the API will report it if not.
        row = (served or {}).get(model, {})
        length = next((row[name] for name in _LENGTH_FIELDS if isinstance(row.get(name), int)), CONTEXT_LENGTH)
        return hosted_info("openai", urlsplit(self.client.url).hostname or "unknown", model, length)

    async def _list_models(self) -> dict[str, Json] | None:
        """Return the entries of `/models` by model id; None if the API has no such list."""
        response = await self.client.send("GET", f"{self._root}/models")
        if response.status in (404, 405, 501):
            await self.client.read(response)
            return None
        if response.status != 200:
            raise await self.client.failure(response)
        answer = parse_json(await self.client.read(response), self.client.url)
        rows = answer.get("data") if isinstance(answer, dict) else answer
        if not isinstance(rows, list):
            return None
        return {str(row["id"]): row for row in rows if isinstance(row, dict) and "id" in row}

    def not_carried(self, request: EngineRequest) -> tuple[str, ...]:
        names = set(super().not_carried(request))
        options = request.options if isinstance(request, ChatRequest) else None
        if options is not None and not self._official:
            names |= options.fields.keys()
            if options.effort is not None or options.thinking_tokens is not None:
                names.add("reasoning_effort")
        return tuple(sorted(names))

    def _decoder(self, request: EngineRequest) -> AnswerDecoder:
        return ChunkDecoder(request.sampling, self.client.name, expect_ids=False)

    async def _start(self, request: EngineRequest, stream: bool) -> HttpResponse:
        """Send the request. If the API's refusal names a field of `_FALLBACK_FIELDS` that the request did not use, send
        the request again with this field, and use the field in all later requests."""
        used = set(self._fallback_fields)  # a copy, because requests in flight at the same time extend the set
        while True:
            path, body = await self.client.thread.run(request.large, self._encode, request, stream, used)
            try:
                return await self.client.post(path, body, large=request.large)
            except RequestError as error:
                named = {name for name in _FALLBACK_FIELDS if name in str(error)} - used
                if not named or error.code == "context_length_exceeded":
                    raise
                used |= named
                self._fallback_fields |= named

    def _encode(self, request: EngineRequest, stream: bool, fallbacks: Set[str] = frozenset()) -> tuple[str, Json]:
        """Return the path and the body. `fallbacks`: the fields of `_FALLBACK_FIELDS` that the body may use."""
        body = {"model": self.info.model, **sampling_fields(request.sampling, _SAMPLING, stream=stream)}
        if "max_tokens" in body and "max_completion_tokens" in fallbacks:
            body["max_completion_tokens"] = body.pop("max_tokens")
        if isinstance(request, TextRequest):
            if not isinstance(request.prompt, str):
                raise RequestError(f"{self.client.name} does not accept token ids.", param="prompt")
            return f"{self._root}/completions", {**body, "prompt": request.prompt}
        fields = chat_fields(request, reasoning="reasoning_content" in fallbacks, official=self._official)
        return f"{self._root}/chat/completions", {**body, **fields}
