"""`openai`: any OpenAI-compatible API, which returns no token ids.

Answers are passed on and recorded as text. They cannot be trained on as they are (the calls have the status
`no_tokens`); `polar rescore` can turn them into off-policy rows later, with the tokens of another engine.

Only parameters that the client set and that OpenAI documents are sent: strict APIs refuse a request for one unknown
field. Where APIs need different fields, the engine begins with the common form. If the API's refusal names the field of
the other form (`_ALTERNATIVES`), the engine repeats the request in that form, and uses it from then on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from urllib.parse import urlsplit

from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.openai_client import OpenAIClient, ServerEngine, sampling_fields
from polar_proxy.engines.openai_stream import ChunkDecoder, parse_json
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, TextRequest

CONTEXT_LENGTH = 128_000
"""Reported to harnesses if the API does not say how long its model's context is."""
_LENGTH_FIELDS = ("context_length", "context_window", "max_context_length", "max_model_len")
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_ALTERNATIVES = ("max_completion_tokens", "reasoning_content")
"""Fields that are sent only after a refusal has named them. OpenAI's reasoning models accept the token limit only as
`max_completion_tokens`; some models require the reasoning of earlier answers, in a field that most APIs do not know."""


class OpenAIEngine(ServerEngine):
    """`async with OpenAIEngine("https://api.example.com/v1", model="m", api_key="...") as engine:`.

    `url` is the API's root, with or without `/v1`; a path that ends in anything else is used as it is. Entering raises
    EngineError if the API cannot be reached, refuses the key, or, without `model`, does not serve exactly one model.
    """

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self.client = OpenAIClient(url, api_key)
        no_path = url.rstrip("/").endswith("/v1") or not urlsplit(self.client.url).path.strip("/")
        self._root = "/v1" if no_path else ""
        self._requested_model = model
        self._alternatives: set[str] = set()
        """The members of `_ALTERNATIVES` that this API was found to need."""

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
        return EngineInfo(
            engine="openai",
            version=urlsplit(self.client.url).hostname or "unknown",
            model=model,
            context_length=length,
            template_hash=None,
            logprob_mode="raw",
            capabilities=frozenset({"tools", "json_schema", "tool_choice_required", "images"}),
        )

    async def _list_models(self) -> dict[str, Json] | None:
        """Return the rows of `/models` by id; None if the API has no such list."""
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

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """Generate an answer; its events carry no ids.

        Log-probabilities are not requested even if the client wants them: without ids they cannot be assigned to
        tokens.
        """
        decoder = ChunkDecoder(request.sampling, self.client.name, expect_ids=False)
        response = await self._start(request, stream)
        async with aclosing(self.client.events(response, decoder, stream=stream)) as steps:
            async for events in steps:
                for event in events:
                    yield event

    async def _start(self, request: EngineRequest, stream: bool) -> HttpResponse:
        """Send the request. If the API refuses it and names a field of `_ALTERNATIVES` that was not used, send it again
        with that field, which all later requests then use as well."""
        used = set(self._alternatives)  # a copy, because requests in flight at the same time extend the set
        while True:
            path, body = await self.client.thread.run(request.large, self._body, request, stream, used)
            try:
                return await self.client.post(self._root + path, body, large=request.large)
            except RequestError as error:
                named = {name for name in _ALTERNATIVES if name in str(error)} - used
                if not named or error.code == "context_length_exceeded":
                    raise
                used |= named
                self._alternatives |= named

    def _body(self, request: EngineRequest, stream: bool, alternatives: set[str]) -> tuple[str, Json]:
        """Return the route below the API's root, and the body, which uses the fields named in `alternatives`."""
        body = {"model": self.info.model, **sampling_fields(request.sampling, _SAMPLING, stream=stream)}
        if "max_tokens" in body and "max_completion_tokens" in alternatives:
            body["max_completion_tokens"] = body.pop("max_tokens")
        if isinstance(request, TextRequest):
            if not isinstance(request.prompt, str):
                raise RequestError(f"{self.client.name} does not accept token ids.", param="prompt")
            return "/completions", {**body, "prompt": request.prompt}
        return "/chat/completions", {**body, **_chat_fields(request, "reasoning_content" in alternatives)}

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        raise RequestError(f"{self.client.name} does not return a prompt's tokens.", status=501, code="unsupported")

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        raise RequestError(f"{self.client.name} does not accept token ids.", status=501, code="unsupported")

    async def health(self) -> str | None:
        try:
            await self._list_models()
        except (EngineError, RequestError) as error:
            return str(error)
        return None


def _chat_fields(request: ChatRequest, reasoning: bool) -> Json:
    """Return the request's messages, its tools with their settings, and its response format.

    `reasoning`: keep the reasoning of earlier answers in the messages.
    """
    body: Json = {"messages": [message.to_openai() for message in request.messages]}
    if not reasoning:
        for message in body["messages"]:
            message.pop("reasoning_content", None)
    if request.tools:
        body["tools"] = list(request.tools)
        for name in ("tool_choice", "parallel_tool_calls"):
            if (value := getattr(request, name)) is not None:
                body[name] = value
    if request.response_format is not None:
        body["response_format"] = request.response_format
    return body
