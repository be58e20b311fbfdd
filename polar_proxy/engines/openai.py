"""`hosted`: any OpenAI-compatible API behind the same interface; it tells no token ids.

Answers are passed on and recorded as text. Nothing of them can be trained on as it is (the calls are `no_tokens`);
`polar rescore` makes off-policy rows of them later, with the tokens of another engine.

Only what the client asked for goes out, and only OpenAI's documented parameters: strict APIs refuse a request for one
field that they do not know. Where such APIs differ among each other the engine begins with the common form, and when
the API refuses it by name it sends the other form once more and keeps to it (`_OTHERWISE`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from polar_proxy.engines.base import Engine
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.openai_client import OpenAIClient, SseDecoder, api_error, parse_json
from polar_proxy.engines.openai_stream import ChunkDecoder
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, TextRequest, TokenIds

CONTEXT_LENGTH = 128_000
"""Told to harnesses where the API does not say how long its model's context is."""
_LENGTH_FIELDS = ("context_length", "context_window", "max_context_length", "max_model_len")
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_OTHERWISE = ("max_completion_tokens", "reasoning_content")
"""Named in a refusal: OpenAI's reasoning models take the limit under its newer name only; some models want the
reasoning of earlier answers back, which most APIs do not know."""


class OpenAIEngine(Engine):
    """`async with HostedEngine("https://api.example.com/v1", model="m", api_key="...") as engine:`.

    `url`: the API's root, with or without `/v1`; a path that ends in anything else is used as it is. Raises EngineError
    on entering when it cannot be reached, refuses the key, or does not say which one model it serves while `model` is
    left out.
    """

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self._http = OpenAIClient(url, api_key)
        path = urlsplit(self._http.url).path
        bare = url.rstrip("/").endswith("/v1") or not path.strip("/")
        self._root = "/v1" if bare else ""
        self._wanted = model
        self._info: EngineInfo | None = None
        self._who = f"The engine at {self._http.url}"
        self._other: set[str] = set()
        """Of `_OTHERWISE`, what this API was seen to want."""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("The engine is not open: use it as `async with engine:`.", status=500)
        return self._info

    async def __aenter__(self) -> Self:
        await self._http.open()
        try:
            self._info = await self._look()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def _look(self) -> EngineInfo:
        served = await self._models()
        model = self._wanted
        if model is None:
            if served is None or len(served) != 1:
                said = "does not list its models" if served is None else f"serves {len(served)} models"
                raise EngineError(f"{self._who} {said}: name one with --model.")
            model = next(iter(served))
        # A model that is not listed may still be served (an alias, a fine-tuned one): the API will say so itself.
        row = (served or {}).get(model, {})
        length = next((row[name] for name in _LENGTH_FIELDS if isinstance(row.get(name), int)), CONTEXT_LENGTH)
        return EngineInfo(
            engine="hosted",
            version=urlsplit(self._http.url).hostname or "unknown",
            model=model,
            context_length=length,
            template_hash=None,
            logprob_mode="raw",
            capabilities=frozenset({"tools", "json_schema", "tool_choice_required", "images"}),
        )

    async def _models(self) -> dict[str, Json] | None:
        """What `/models` lists, by id; None where the API has no such list."""
        response = await self._http.send("GET", f"{self._root}/models")
        if response.status in (404, 405, 501):
            await self._http.read(response)
            return None
        if response.status != 200:
            raise await self._http.failure(response)
        answer = parse_json(await self._http.read(response), self._http.url)
        rows = answer.get("data") if isinstance(answer, dict) else answer
        if not isinstance(rows, list):
            return None
        return {str(row["id"]): row for row in rows if isinstance(row, dict) and "id" in row}

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: TokenIds | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """As in `Engine.sample`; the events carry no ids. Log-probabilities that a client asks for are not asked for:
        without ids there is nothing that they belong to."""
        if prompt is not None:
            raise RequestError(f"{self._who} does not take token ids.", param="prompt")
        parser = ChunkDecoder(request.sampling, self._who, expect_ids=False)
        usage: tuple[int, int] | None = None
        response = await self._begin(request, stream)
        try:
            if stream:
                decoder = SseDecoder(self._http.url)
                while not decoder.done and (data := await self._http.read_some(response)):
                    chunks = decoder.feed(data)
                    usage = _usage(chunks) or usage
                    for event in self._parse(parser, chunks):
                        yield event
            else:
                answer = parse_json(await self._http.read(response), self._http.url)
                if isinstance(answer, dict) and "error" in answer and not answer.get("choices"):
                    raise api_error(answer, _code(answer), self._who)
                usage = _usage([answer])
                for event in self._parse(parser, [answer]):
                    yield event
            for event in self._parse(parser, None):
                yield replace(event, usage=usage)
            await self._http.finish(response)
        finally:
            # An answer that was not read to its end closes the connection, at which the API stops generating.
            response.close()

    async def _begin(self, request: EngineRequest, stream: bool) -> HttpResponse:
        while True:
            path, body = self._body(request, stream)
            try:
                return await self._http.post(self._root + path, body)
            except RequestError as error:
                named = {name for name in _OTHERWISE if name in str(error)} - self._other
                if not named or error.code == "context_length_exceeded":
                    raise
                self._other |= named

    def _body(self, request: EngineRequest, stream: bool) -> tuple[str, Json]:
        """(path behind the root, body)"""
        body = _sampling(self.info.model, request, "max_completion_tokens" in self._other)
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if isinstance(request, TextRequest):
            if not isinstance(request.prompt, str):
                raise RequestError(f"{self._who} does not take token ids.", param="prompt")
            return "/completions", {**body, "prompt": request.prompt}
        return "/chat/completions", {**body, **_conversation(request, "reasoning_content" in self._other)}

    def _parse(self, parser: ChunkDecoder, chunks: list[Json] | None) -> list[SampleEvent]:
        try:
            return parser.end() if chunks is None else parser.feed(chunks)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._who} sent an answer of an unknown shape: {error!r}.") from error

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        raise RequestError(f"{self._who} does not tell the tokens of a prompt.", status=501, code="unsupported")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise RequestError(f"{self._who} does not take token ids.", status=501, code="unsupported")

    async def health(self) -> str | None:
        try:
            await self._models()
        except (EngineError, RequestError) as error:
            return str(error)
        return None


def _usage(chunks: Sequence[Json]) -> tuple[int, int] | None:
    """(prompt, answers) in tokens, where a chunk tells: agents look at them to know how full the context is."""
    for chunk in reversed(chunks):
        told = chunk.get("usage") if isinstance(chunk, dict) else None
        if isinstance(told, dict):
            counts = told.get("prompt_tokens"), told.get("completion_tokens")
            if isinstance(counts[0], int) and isinstance(counts[1], int):
                return counts[0], counts[1]
    return None


def _code(answer: Json) -> int:
    """The status of an error that came with status 200, as gateways of several providers send it."""
    error = answer["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 502


def _sampling(model: str, request: EngineRequest, newer: bool) -> Json:
    sampling = request.sampling
    body: Json = {"model": model}
    for name in _SAMPLING:
        if (value := getattr(sampling, name)) is not None:
            body["max_completion_tokens" if newer and name == "max_tokens" else name] = value
    if sampling.n != 1:
        body["n"] = sampling.n
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = dict(sampling.logit_bias)
    return body


def _conversation(request: ChatRequest, reasoning: bool) -> Json:
    """The API answers tools together with a `response_format` by itself: both go out as they came."""
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
