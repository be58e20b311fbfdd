"""The routes of a vLLM server as methods, and Polar's requests as the bodies of these routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean
from typing import Any, TypeVar

from polar_proxy.engines.base import EngineLoad, enforced_format
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.logprobs import ALTERNATIVES, at_temperature
from polar_proxy.engines.openai_client import OpenAIClient, sampling_fields, server_message
from polar_proxy.engines.openai_stream import MISSING_BELOW, ChunkDecoder
from polar_proxy.engines.vllm.parser_process import ParserProcess
from polar_proxy.errors import EngineError, PolarError, RequestError
from polar_proxy.types import (
    ChatRequest,
    Json,
    SampleEvent,
    Sampling,
    TextRequest,
    TokenIds,
    TopLogprob,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DERENDER = "/v1/chat/completions/derender"
T = TypeVar("T")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)

_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""Names of vLLM's metric of KV-cache usage: the name since version 0.10, then the older name. Values are shares from
0 to 1, although the names end in `perc`."""
_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
# One sample of Prometheus' text format: a name, optional labels, a value.
_METRIC = re.compile(rf"^({'|'.join((*_KV_USAGE, _WAITING, _RUNNING))})(?:\{{[^\n]*\}})? +([^ \n]+)", re.MULTILINE)


class SeparateChunkDecoder(ChunkDecoder):
    """Decoder that returns a separate event for each of the server's chunks, even if several arrive together."""

    def feed(self, chunks: Iterable[Json]) -> list[SampleEvent]:
        return [event for chunk in chunks for event in super(SeparateChunkDecoder, self).feed([chunk])]


class VllmClient(OpenAIClient):
    """A vLLM server. `model` goes into every request body. If the user named no model, the probe sets `model`."""

    def __init__(self, url: str, api_key: str | None = None, *, model: str | None = None) -> None:
        super().__init__(url, api_key)
        self.model = model or ""
        self.renderer: ParserProcess | None = None
        """The side process that renders conversations, if the server's `/tokenize` and its chat route render them
        differently. The probe sets it."""

    async def send(self, method: str, path: str, body: Json | None = None, **options: Any) -> HttpResponse:
        body = None if body is None else {"model": self.model, **body}
        return await super().send(method, path, body, **options)

    async def chat(self, body: Json) -> Json:
        answer = await self.json("POST", CHAT, body)
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise EngineError(f"{self.name} sent a chat answer that has no choices.")
        return answer

    async def sampled(self, path: str, body: Json) -> list[SampleEvent]:
        """Return all events of a streamed answer, one for each of the server's chunks."""
        response = await self.post(path, {**body, "stream": True})
        steps = self.events(response, SeparateChunkDecoder(Sampling(), self.name), stream=True)
        return [event async for events in steps for event in events]

    async def render(self, body: Json) -> list[int]:
        """Return the ids of a conversation (`messages` in the body), rendered by `/tokenize` or by the side process."""
        if self.renderer is not None:
            (rendering,) = await self.renderer.render([{"model": self.model, **body}])
            return rendering.ids
        return await self._tokenize(body)

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a text. The tokenizer adds no tokens of its own, such as BOS."""
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def _tokenize(self, body: Json) -> list[int]:
        return list(self.field(await self.json("POST", "/tokenize", body), "tokens"))

    async def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included."""
        body = {"tokens": [int(token) for token in token_ids]}
        return str(self.field(await self.json("POST", "/detokenize", body), "prompt"))

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the log-probabilities of token_ids[1:]. The server samples one extra token.

        vLLM returns the log-probabilities of prompt tokens at temperature 1 only. For another temperature they are
        computed from the most likely tokens of each position (`at_temperature`).
        """
        alternatives = 0 if temperature == 1.0 else ALTERNATIVES
        body = {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": alternatives, "temperature": 0}
        answer = await self.json("POST", COMPLETIONS, body)
        rows = answer["choices"][0].get("prompt_logprobs") if answer.get("choices") else None
        if not rows or len(rows) != len(token_ids):
            raise EngineError(f"{self.name} returned no log-probabilities for the {len(token_ids)} tokens of a prompt.")
        out: list[float] = []
        for token, row in zip(token_ids[1:], rows[1:], strict=True):
            entry = (row or {}).get(str(token))
            if entry is None:
                raise EngineError(f"{self.name} returned no log-probability for token {token} of a prompt.")
            if entry["logprob"] <= MISSING_BELOW:
                out.append(nan)
            elif temperature == 1.0:
                out.append(entry["logprob"])
            else:
                known = [other["logprob"] for other in row.values() if other["logprob"] > MISSING_BELOW]
                out.append(at_temperature(entry["logprob"], known, temperature))
        return out

    async def weight_version(self) -> str:
        """Return the policy version that `/weight_info` reports (in development mode only)."""
        return str(self.field(await self.json("GET", "/weight_info"), "weight_version"))

    async def load(self) -> EngineLoad | None:
        """Return the load that `/metrics` reports; None without metrics (`--disable-log-stats`)."""
        response = await self.send("GET", "/metrics")
        text = await self.read(response)
        return parse_load(text.decode(errors="replace")) if response.status == 200 else None


async def unless_refused(call: Awaitable[T]) -> T | None:
    """Await `call` and return its result, or None if it raises a PolarError.

    Any PolarError counts, because some servers answer 500 to a request that they do not support.
    """
    try:
        return await call
    except PolarError:
        return None


def parse_load(text: str) -> EngineLoad | None:
    """Return the load of all replicas of one server, from the text of `/metrics`.

    Source: https://docs.vllm.ai/en/latest/usage/metrics/. Values that are not finite are ignored; None if no value is
    left.
    """
    found: dict[str, list[float]] = {}
    for name, value in _METRIC.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if 0 <= number < float("inf"):
            found.setdefault(name, []).append(number)
    if not found:
        return None
    usage = next((fmean(found[name]) for name in _KV_USAGE if name in found), None)
    replicas = max(map(len, found.values()))
    return EngineLoad(usage, _total(found.get(_WAITING)), _total(found.get(_RUNNING)), replicas)


def _total(values: list[float] | None) -> int | None:
    return None if values is None else round(sum(values))


class TokenTexts:
    """The texts of single tokens, looked up at the server and kept.

    vLLM names an alternative token either by its text, which several tokens may share, or by its id. Polar requests
    ids, which are exact, and looks up their texts. Only calls whose client wants alternatives pay for this.
    """

    def __init__(self, client: VllmClient, separator: int | None) -> None:
        """`separator`: a special token whose text occurs in no other token. It is put between tokens to decode many in
        one request. Without a separator, each token is decoded by a separate request."""
        self._client = client
        self._separator = separator
        self._table: dict[int, str] = {}

    async def add_texts(self, events: list[SampleEvent]) -> list[SampleEvent]:
        """Return the events with the text of every alternative token, and of the sampled tokens that came without
        text."""
        wanted = {other.token_id for event in events for row in event.top for other in row}
        wanted.update(token for event in events for token in event.token_ids)
        await self._look_up(sorted(token for token in wanted if token >= 0 and token not in self._table))
        text = self._table.get
        return [
            replace(
                event,
                tokens=tuple(
                    sent or text(token, "") for token, sent in zip(event.token_ids, event.tokens, strict=True)
                ),
                top=tuple(
                    tuple(TopLogprob(o.token_id, text(o.token_id, ""), o.logprob) for o in row) for row in event.top
                ),
            )
            for event in events
        ]

    async def _look_up(self, token_ids: list[int]) -> None:
        if not token_ids:
            return
        if self._separator is not None:
            separated = [self._separator]
            for token in token_ids:
                separated += (token, self._separator)
            mark = await self._client.decode([self._separator])
            parts = (await self._client.decode(separated)).split(mark)
            if len(parts) == len(token_ids) + 2:
                self._table.update(zip(token_ids, parts[1:-1], strict=True))
                return
        texts = await asyncio.gather(*(self._client.decode([token]) for token in token_ids))
        self._table.update(zip(token_ids, texts, strict=True))


# The bodies of requests, without the model's name


def chat_body(request: ChatRequest, *, stream: bool) -> Json:
    """Return the body for `/v1/chat/completions`.

    `response_format` is left out while the model may call tools (see `enforced_format`), because vLLM's grammar would
    constrain the whole answer and forbid tool calls. `parallel_tool_calls` is left out, because vLLM would hide
    calls that were sampled, or add a grammar. The gateway limits the calls instead (`one_call.py`).
    """
    body = _sampling_body(request.sampling, stream) | conversation_fields(request)
    body["logprobs"] = True
    if request.sampling.top_logprobs:
        body["top_logprobs"] = request.sampling.top_logprobs
    if request.tools and request.tool_choice is not None:
        body["tool_choice"] = request.tool_choice
    if (form := enforced_format(request)) is not None:
        body["response_format"] = form
    return body


def render_body(request: ChatRequest, *, generation: bool = True) -> Json:
    """Return the body for `/tokenize` that renders a conversation. `generation`: add the tokens that open the next
    answer."""
    return {**conversation_fields(request), "add_generation_prompt": generation}


def conversation_fields(request: ChatRequest) -> Json:
    """Return the messages, tools and template options as fields of a request body."""
    body: Json = {"messages": [server_message(message) for message in request.messages]}
    if request.tools:
        body["tools"] = list(request.tools)
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    return body


def text_body(request: TextRequest, *, stream: bool) -> Json:
    """Return the body for `/v1/completions` of a raw prompt."""
    body = _sampling_body(request.sampling, stream)
    body["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    body["logprobs"] = request.sampling.top_logprobs  # counts the alternatives; the sampled token is always included
    return body


def exact_body(request: ChatRequest, prompt: TokenIds, context_length: int, *, stream: bool) -> Json:
    """Return the body for `/v1/completions` that samples the answer to a chat from exactly these prompt ids.

    The body always has `max_tokens`: without this field, a completion would end after 16 tokens, whereas a chat ends
    only at the end of the context.
    """
    room = context_length - prompt.size
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {context_length} tokens. However, your request has {prompt.size} "
            "input tokens.",
            code="context_length_exceeded",
        )
    wanted = request.sampling.max_tokens
    sampling = replace(request.sampling, max_tokens=room if wanted is None else min(wanted, room))
    body = text_body(TextRequest(request.model, (), sampling), stream=stream)
    body["prompt"] = prompt.tolist()
    return body


def _sampling_body(sampling: Sampling, stream: bool) -> Json:
    body = {"return_token_ids": True, **sampling_fields(sampling, _SAMPLING, stream=stream)}
    if sampling.top_logprobs:
        body["return_tokens_as_token_ids"] = True
    return body
