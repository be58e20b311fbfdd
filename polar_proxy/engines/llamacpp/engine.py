"""`llamacpp`: llama.cpp's server over HTTP, recorded with exact token ids and log-probabilities.

Every answer is sampled by `/completion` from token ids. A conversation is first rendered to text: by the server
(`/apply-template`), or in this process if comparisons showed that this gives the same text. Answers are parsed in the
Hermes format; `probe.py` finds out whether the model's template writes tool calls in this format.

The stream of a llama-server leaves out tokens that end within a character (llama.cpp's `process_token`). Each chunk
counts the tokens sampled so far, so a gap is noticed. The next chunk's text covers the missing tokens and its own
token. If only one sequence of tokens can spell the missing part, the stream is closed, the log-probabilities of these
tokens are requested, and a new request samples the rest of the answer, from the same distribution. Otherwise, or if
`max_tokens` ends the answer within a character, the missing tokens are recorded as unknown. A call with unknown tokens
is not trained.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan

from polar_proxy.engines.base import CannotContinueError, ExactPrompt, uses_tools
from polar_proxy.engines.hermes import PROMPT_TAIL, HermesParser, reasoning_kind
from polar_proxy.engines.llamacpp.client import (
    LlamaCppClient,
    StreamedToken,
    sampled_logprob,
    sampling_body,
    stream_fields,
    streamed_token,
)
from polar_proxy.engines.llamacpp.probe import LlamaServerModel, probe_server
from polar_proxy.engines.local_rendering import LocallyRenderingEngine, LocalRenderer
from polar_proxy.engines.logprobs import ALTERNATIVES, at_temperature
from polar_proxy.engines.openai_client import not_open
from polar_proxy.engines.openai_stream import UNKNOWN_ID
from polar_proxy.engines.stop_strings import StopStrings
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, Sampling, TokenIds

_UNKNOWN = StreamedToken(UNKNOWN_ID, nan)
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


@dataclass(slots=True)
class AnswerState:
    """One choice while it is sampled."""

    index: int
    prompt: list[int]
    sampling: Sampling
    stops: StopStrings
    parser: HermesParser | None
    seed: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    """The raw text of `ids`."""
    finished: bool = False
    gaps: int = 0
    """How many times the stream was closed because of missing tokens."""


class LlamaCppEngine(LocallyRenderingEngine):
    """An engine behind a llama-server.

    `async with LlamaCppEngine("http://127.0.0.1:8080") as engine:` connects to the server and verifies it. Entering
    raises EngineError if the server cannot be reached, or does not return token ids and log-probabilities.
    """

    client: LlamaCppClient
    _model: LlamaServerModel | None = None

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        """`model` is the name that the server must report. `api_key` is sent as a bearer token."""
        self.client = LlamaCppClient(url, api_key)
        self._requested_model = model

    async def _connect(self) -> EngineInfo:
        self._model = await probe_server(self.client, self._requested_model)
        if self._model.template is not None:
            self._local = await LocalRenderer.find(self._model.template, self.client.apply_template, str)
        return self._model.info

    @property
    def model(self) -> LlamaServerModel:
        if self._model is None:
            raise not_open()
        return self._model

    @property
    def continue_problem(self) -> str | None:
        return self.model.problem

    # Rendering

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        (text,) = await self.render_texts([request], generation=generation)
        return await self.client.tokenize(text, add_special=True)

    async def render_texts(self, requests: Sequence[ChatRequest], *, generation: bool = True) -> list[str]:
        return await super().render_texts(list(map(_with_used_tools, requests)), generation=generation)

    async def _texts_of_server(self, requests: Sequence[ChatRequest], generation: bool) -> list[str]:
        return [await self.client.apply_template(request, generation=generation) for request in requests]

    async def confirm_rendering(self, request: ChatRequest, end: Sequence[int]) -> bool:
        return await super().confirm_rendering(_with_used_tools(request), end)

    async def encode(self, text: str) -> list[int]:
        return await self.client.tokenize(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self.client.decode([int(token) for token in token_ids])

    # Sampling

    async def accept_prompt(self, request: ChatRequest, token_ids: TokenIds) -> ExactPrompt:
        if self.model.problem is not None:
            raise CannotContinueError(self.model.problem)
        return await super().accept_prompt(request, token_ids)

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """Implement `Engine.sample`. Each choice is a separate request, because the server limits `n` to the number of
        its slots."""
        sampling = request.sampling
        if isinstance(request, ChatRequest):
            ids = await self.render(request) if prompt is None else prompt.token_ids.tolist()
        elif isinstance(request.prompt, str):
            ids = await self.client.tokenize(request.prompt, add_special=True)
        else:
            ids = list(request.prompt)
        self._check(request, ids)
        seed = secrets.randbits(31) if sampling.seed is None else sampling.seed
        new_parser = await self._parser_factory(request, ids)
        answers = [
            AnswerState(index, ids, sampling, StopStrings(sampling.stop), new_parser and new_parser(), seed + index)
            for index in range(sampling.n)
        ]
        first = True
        async with aclosing(_together([self._answer(answer) for answer in answers])) as events:
            async for event in events:
                yield replace(event, prompt_ids=ids) if first else event
                first = False

    async def _parser_factory(self, request: EngineRequest, prompt: Sequence[int]) -> Callable[[], HermesParser] | None:
        if not isinstance(request, ChatRequest):
            return None
        reasoning = reasoning_kind(self.model.template_source, await self.decode(prompt[-PROMPT_TAIL:]))
        return partial(HermesParser, tools=uses_tools(request), reasoning=reasoning)

    def _check(self, request: EngineRequest, ids: Sequence[int]) -> None:
        """Raise RequestError if the request cannot be served."""
        limit, param = self.info.context_length, "messages" if isinstance(request, ChatRequest) else "prompt"
        if isinstance(request, ChatRequest) and uses_tools(request) and "tools" not in self.info.capabilities:
            raise RequestError(f"Polar cannot read this model's tool calls: {self.model.problem}", param="tools")
        size = self.model.vocabulary.size
        if not all(key.isdecimal() and int(key) < size for key in request.sampling.logit_bias or ()):
            raise RequestError(f"logit_bias must have token ids from 0 to {size - 1} as keys.", param="logit_bias")
        if not ids:
            raise RequestError("The prompt is empty.", param="prompt")
        if len(ids) >= limit:
            text = (
                f"This model's maximum context length is {limit} tokens. However, your request has {len(ids)} input "
                "tokens."
            )
            raise RequestError(text, param=param, code="context_length_exceeded")

    async def _answer(self, answer: AnswerState) -> AsyncGenerator[SampleEvent, None]:
        """Yield one choice. Its sampling continues in a new request after each gap whose tokens were recovered."""
        while not answer.finished:
            async with aclosing(self._stream(answer)) as events:
                async for event in events:
                    yield event

    def _body(self, answer: AnswerState) -> Json:
        prompt = [*answer.prompt, *answer.ids]
        context = self.info.context_length
        sampling, sampled = answer.sampling, len(answer.ids)
        if sampling.max_tokens is not None:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - sampled)
        seed = answer.seed + (answer.gaps << 16)
        return {**stream_fields(prompt), **sampling_body(sampling, seed, context, context - len(prompt))}

    async def _stream(self, answer: AnswerState) -> AsyncGenerator[SampleEvent, None]:
        """Yield the events of one request to the server, up to the end of the answer or the first recovered gap.

        If a gap ends the request, the last event has the recovered tokens and the token after them.
        """
        body, before = self._body(answer), len(answer.ids)
        async with aclosing(self.client.chunks(body)) as chunks:
            async for chunk in chunks:
                if chunk["tokens_evaluated"] != len(body["prompt"]):
                    raise EngineError(f"{self.client.name} did not use the prompt tokens that it was given.")
                token = streamed_token(chunk, answer.sampling.top_logprobs, self.client.name)
                missing = chunk["tokens_predicted"] - (len(answer.ids) - before) - (token is not None)
                spelling = self._spelling(answer, missing, token, chunk) if token is not None and missing else None
                if token is not None and spelling is not None:
                    break
                yield self._event(answer, [_UNKNOWN] * missing + ([token] if token else []), chunk)
                if answer.finished:
                    return
            else:
                raise AssertionError("unreachable: the last chunk finishes the answer")
        tokens = [*await self._recovered(answer, spelling, chunk), token]
        room = self.info.context_length - len(answer.prompt)
        full = len(answer.ids) + len(tokens) >= min(room, answer.sampling.max_tokens or room)
        yield self._event(answer, tokens, chunk, full=full)

    def _spelling(self, answer: AnswerState, missing: int, token: StreamedToken, chunk: Json) -> list[int] | None:
        """Return the ids of the missing tokens before `token`; None if these ids are not certain.

        `missing`: the number of missing tokens. The chunk's text is the text of these tokens, followed by `token`'s.
        """
        text, last = chunk["content"].encode(), self.model.vocabulary.token_bytes.get(token.token_id, b"")
        if UNKNOWN_ID in answer.ids or "\ufffd" in chunk["content"] or not text.endswith(last):
            return None  # U+FFFD stands for any bytes that are no character
        spellings = self.model.vocabulary.spellings(text[: len(text) - len(last)], missing)
        return spellings[0] if len(spellings) == 1 else None

    async def _recovered(self, answer: AnswerState, spelling: list[int], chunk: Json) -> list[StreamedToken]:
        """Return the missing tokens with their log-probabilities.

        The log-probabilities are requested from the slot that sampled the tokens: it has the prompt cached.
        """
        answer.gaps += 1
        prompt, out = [*answer.prompt, *answer.ids], []
        for token_id in spelling:
            rows = await self.client.next_tokens(prompt, self.info.eos_token_ids[0], chunk.get("id_slot", -1))
            out.append(StreamedToken(token_id, sampled_logprob(rows, token_id, answer.sampling)))
            prompt.append(token_id)
        return out

    def _event(
        self, answer: AnswerState, tokens: Sequence[StreamedToken], chunk: Json, *, full: bool = False
    ) -> SampleEvent:
        """Return the event of a chunk with these tokens, and add them to `answer`.

        `full`: the answer ends here, because there is no room for more tokens. The finish reason is then `length`,
        unless the server or a stop string has ended the answer already.
        """
        answer.ids += [token.token_id for token in tokens]
        answer.text += chunk["content"]
        text, finish, stopped = answer.stops.feed(chunk["content"]), None, None
        if answer.stops.stopped_at is not None:
            finish, stopped = "stop", answer.stops.stopped_at
        elif chunk["stop"]:
            finish, stopped = _FINISH[chunk["stop_type"]], chunk["stopping_word"] or None
        elif full:
            finish = "length"
        if finish is not None:
            text += answer.stops.close()
        answer.finished = finish is not None
        shown = answer.sampling.logprobs or answer.sampling.top_logprobs
        event = SampleEvent(
            answer.index,
            text,
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=tuple(token.logprob for token in tokens),
            tokens=tuple(token.text for token in tokens) if shown else (),
            top=tuple(token.top for token in tokens) if answer.sampling.top_logprobs else (),
            finish_reason=finish,
            cached_tokens=(chunk.get("timings") or {}).get("cache_n") if finish and not answer.gaps else None,
            stop_sequence=stopped,
        )
        return event if answer.parser is None else answer.parser.parse(event)

    # Scoring

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Implement `Engine.score` by one request for each token. A bias makes the server sample this token.

        This is needed because llama.cpp returns no log-probabilities of a prompt. The server computes only one new
        token per request, because its cache has all earlier tokens.
        """
        ids = [int(token) for token in token_ids]
        if len(ids) > self.info.context_length:
            raise RequestError("The sequence is longer than the context.", code="context_length_exceeded")
        return [await self._score_one(ids[:place], ids[place], temperature) for place in range(1, len(ids))]

    async def _score_one(self, prompt: list[int], token: int, temperature: float) -> float:
        answer = await self.client.forced(prompt, token, n_probs=1 if temperature == 1.0 else ALTERNATIVES)
        if not answer.get("completion_probabilities"):  # its text is a part of a character
            rows = await self.client.next_tokens(prompt, self.info.eos_token_ids[0])
            return sampled_logprob(rows, token, Sampling(temperature=temperature))
        (entry,) = answer["completion_probabilities"]
        if temperature == 1.0:
            return float(entry["logprob"])
        known = [row["logprob"] for row in entry["top_logprobs"]]
        if token not in [row["id"] for row in entry["top_logprobs"]]:
            known.append(entry["logprob"])
        return at_temperature(entry["logprob"], known, temperature)


def _with_used_tools(request: ChatRequest) -> ChatRequest:
    """Remove the tools from a request if the model must not use them. Otherwise the template would show the tools to
    the model."""
    return request if uses_tools(request) else replace(request, tools=())


async def _together(answers: Sequence[AsyncGenerator[SampleEvent, None]]) -> AsyncGenerator[SampleEvent, None]:
    """Yield the events of several streamed answers as they arrive. Closing this generator closes all of them."""
    waiting = {asyncio.ensure_future(anext(answer)): answer for answer in answers}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(answer))] = answer
                yield event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for answer in answers:
            await answer.aclose()
