"""vLLM's OpenAI server over HTTP, as an engine that records what was really sampled.

Conversations go to `/v1/chat/completions`, raw prompts to `/v1/completions`, both with `return_token_ids` and
log-probabilities on. The server proves at start that it can do this (`probe.py`); what it cannot do, the engine
refuses to be used for.

A conversation that is continued from exact ids goes to `/v1/completions`, too, and its answer is read as the chat route
would read it (`vllm_reading.py`); the server proved at start that it is. `continue_problem` says why where it is not.

An answer of the chat route is streamed from the server when the client streams or the request has tools. Without
tools, a client that does not stream is served from one JSON object, which costs a fraction of 250 chunks. With tools,
they differ: a call cut by `max_tokens` is raw text in one and a tool call in the other, and an agent must not be
able to tell from its answer whether it streamed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

from polar_proxy.engines.base import Engine, EngineLoad, is_constrained
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.openai_client import OpenAIClient, SseDecoder, parse_json
from polar_proxy.engines.openai_stream import ChunkDecoder
from polar_proxy.engines.vllm.answer_parser import AnswerParser, cannot_continue, make_answer_parser
from polar_proxy.engines.vllm.load import read_load
from polar_proxy.engines.vllm.parser_proof import ProvenParsers
from polar_proxy.engines.vllm.probe import ServerProbe
from polar_proxy.engines.vllm.requests import (
    chat_body,
    exact_body,
    prompt_body,
    render_body,
    score_body,
    scores,
    text_body,
)
from polar_proxy.engines.vllm.tokens import TokenTexts
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, TokenIds

WEIGHT_VERSION_SECONDS = 1.0


class VllmEngine(Engine):
    """`async with VllmEngine("http://127.0.0.1:8000") as engine:` connects and verifies the server.

    Raises EngineError on entering when the server cannot be reached, serves another model, or does not return token
    ids and log-probabilities (unless `require_tokens` is off: then it answers, and nothing can be trained on).
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, require_tokens: bool = True
    ) -> None:
        """`model` may be left out where the server serves one model. `api_key` is sent as a bearer token."""
        self._http = OpenAIClient(url, api_key)
        self._wanted = model
        self._require_tokens = require_tokens
        self._info: EngineInfo | None = None
        self._tokenize_renders = False
        self._readings: ProvenParsers | RequestError | None = None
        self._asks: Json = {}
        self._weight_version: str | None = None
        self._weight_version_at = self._weights_changed_at = 0.0
        self._who = f"The engine at {self._http.url}"

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("The engine is not open: use it as `async with engine:`.", status=500)
        return self._info

    @property
    def continue_problem(self) -> str | None:
        """Why conversations are not continued from exact ids, and the remedy; None where they are."""
        return None if isinstance(self._readings, ProvenParsers) else str(self._readings or "The engine is not open.")

    async def __aenter__(self) -> Self:
        await self._http.open()
        try:
            found = await ServerProbe(self._http, model=self._wanted, require_tokens=self._require_tokens).run()
        except BaseException:
            await self._http.close()
            raise
        self._info = found.info
        self._tokenize_renders = found.tokenize_renders
        self._readings = found.readings
        self._asks = {"return_weight_versions": True} if "weight_versions" in found.info.capabilities else {}
        self._weight_version = found.weight_version
        self._weight_version_at = time.monotonic()
        separator = next(iter(found.info.eos_token_ids), None)
        self._texts = TokenTexts(self._http, found.info.model, separator)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: TokenIds | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """As in `Engine.sample`; `stream=False` tells that the client wants the answer in one piece."""
        info = self.info
        named = bool(request.sampling.top_logprobs)
        parser = ChunkDecoder(request.sampling, self._who, expect_ids="token_ids" in info.capabilities)
        reader: AnswerParser | None = None
        asked: list[int] = []
        if prompt is not None:
            reader, special = await self._reader(request, prompt)
            room = info.context_length - prompt.size
            body = exact_body(info.model, request, prompt, room, stream=stream, special=special)
            asked = body["prompt"]
            response = await self._begin("/v1/completions", body)
        elif isinstance(request, ChatRequest):
            stream = stream or bool(request.tools)
            response = await self._begin("/v1/chat/completions", chat_body(info.model, request, stream=stream))
        else:
            response = await self._begin("/v1/completions", text_body(info.model, request, stream=stream))
        try:
            if stream:
                decoder = SseDecoder(self._http.url)
                while not decoder.done and (data := await self._http.read_some(response)):
                    for event in await self._parse(parser, decoder.feed(data), named):
                        yield event if reader is None else await self._read(reader, event, asked)
            else:
                answer = parse_json(await self._http.read(response), self._http.url)
                for event in await self._parse(parser, [answer], named):
                    yield event if reader is None else await self._read(reader, event, asked)
            for event in await self._parse(parser, None, named):
                yield event if reader is None else await self._read(reader, event, asked)
            await self._http.finish(response)
        finally:
            # An answer that was not read to its end closes the connection, at which vLLM aborts the generation.
            response.close()

    async def _reader(self, request: EngineRequest, prompt: TokenIds) -> tuple[AnswerParser | None, bool]:
        """Who reads the answer to exact ids, and whether it has to show special tokens. Raises RequestError."""
        if not isinstance(request, ChatRequest):
            if "token_prompt" not in self.info.capabilities:
                raise cannot_continue("it does not sample from token ids.")
            return None, False
        if is_constrained(request):
            raise cannot_continue("the answer is held to a grammar, which the server makes for conversations only.")
        if not isinstance(self._readings, ProvenParsers):
            raise self._readings or cannot_continue("the engine is not open.")
        reading = await self._readings.of(request.template_kwargs)
        self._readings.check(prompt, reading)
        return make_answer_parser(self._http, self.info.model, request, prompt, reading), reading.shows_special(request)

    async def _read(self, reader: AnswerParser, event: SampleEvent, asked: list[int]) -> SampleEvent:
        """The event as the chat route would tell it; checks that the server took the prompt as it was given."""
        if event.prompt_ids is not None and event.prompt_ids != asked:
            raise EngineError(f"{self._who} sampled from other prompt tokens than it was given.")
        return await reader.read(event)

    async def cannot_continue(self, request: ChatRequest, prompt: TokenIds) -> str | None:
        """As in `Engine.cannot_continue`. Template options that are met for the first time are verified, which takes as
        long as a few dozen sampled tokens."""
        try:
            await self._reader(request, prompt)
        except RequestError as error:
            return str(error)
        return None

    async def _begin(self, path: str, body: Json) -> HttpResponse:
        """Send; where `max_tokens` does not fit behind the prompt, let the answer take the room that there is.

        Agents ask for as much as their own provider's largest model may write; vLLM refuses what is beyond the context,
        where the others cut it.
        """
        body |= self._asks
        try:
            return await self._http.post(path, body)
        except RequestError as error:
            if error.code != "context_length_exceeded" or "max_tokens" not in str(error) or "max_tokens" not in body:
                raise
        return await self._http.post(path, {key: value for key, value in body.items() if key != "max_tokens"})

    async def _parse(self, parser: ChunkDecoder, chunks: list[Json] | None, named: bool) -> list[SampleEvent]:
        """The events of these chunks, or of the end of the answer (None); `named`: with texts of alternatives."""
        try:
            events = parser.end() if chunks is None else parser.feed(chunks)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._who} sent an answer of an unknown shape: {error!r}.") from error
        return await self._texts.named(events) if named and events else events

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        """The prompt ids: by `/tokenize` where it was seen to agree with the chat route, else by a one-token call."""
        if self._tokenize_renders:
            body = render_body(self.info.model, request, generation=generation)
            answer = await self._http.json("POST", "/tokenize", body)
            return list(self._field(answer, "tokens"))
        if not generation:
            raise RequestError(f"{self._who} renders conversations only together with what opens the answer.")
        answer = await self._http.json("POST", "/v1/chat/completions", prompt_body(self.info.model, request))
        return list(self._field(answer, "prompt_token_ids"))

    async def decode(self, token_ids: Sequence[int]) -> str:
        answer = await self._http.json(
            "POST", "/detokenize", {"model": self.info.model, "tokens": [int(token) for token in token_ids]}
        )
        return str(self._field(answer, "prompt"))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """As in `Engine.score`. The engine adds one token of its own, so one position of the context stays free."""
        ids = [int(token) for token in token_ids]
        if len(ids) < 2:
            return []
        if "score" not in self.info.capabilities:
            raise RequestError(f"{self._who} does not return the log-probabilities of a prompt.")
        answer = await self._http.json("POST", "/v1/completions", score_body(self.info.model, ids))
        return scores(ids, answer, self._who)

    async def health(self) -> str | None:
        try:
            response = await self._http.send("GET", "/health")
            await self._http.read(response)
        except EngineError as error:
            return str(error)
        return None if response.status == 200 else f"{self._who} answers {response.status} to /health."

    async def load(self) -> EngineLoad | None:
        """As in `Engine.load`, from `/metrics`; None where that says nothing of it (`--disable-log-stats`)."""
        response = await self._http.send("GET", "/metrics")
        said = await self._http.read(response)
        return read_load(said.decode(errors="replace")) if response.status == 200 else None

    async def weight_version(self) -> str | None:
        """What `/weight_info` said within the last second; None where the server has no such route.

        (vLLM has it in development mode.) Each call that is recorded asks; a request for each would cost as much as
        the rest of the recording. Whoever updates weights pauses the engine for longer than this, or calls
        `weights_changed` while it is paused.
        """
        if self._weight_version is None:
            return None
        now, known_since = time.monotonic(), self._weight_version_at
        if known_since <= self._weights_changed_at or now - known_since > WEIGHT_VERSION_SECONDS:
            answer = await self._http.json("GET", "/weight_info")
            self._weight_version = str(self._field(answer, "weight_version"))
            self._weight_version_at = now
        return self._weight_version

    def weights_changed(self) -> None:
        """The server has other weights: their version is asked for when it is wanted next."""
        self._weights_changed_at = time.monotonic()

    def _field(self, answer: Any, name: str) -> Any:
        value = answer.get(name) if isinstance(answer, dict) else None
        if value is None:
            raise EngineError(f"{self._who} sent an answer without {name!r}.")
        return value
