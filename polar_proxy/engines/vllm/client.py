"""The routes of a vLLM server as methods, besides those that sample an answer for an agent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from polar_proxy.engines.base import EngineLoad
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.openai_client import OpenAIClient
from polar_proxy.engines.openai_stream import ChunkDecoder
from polar_proxy.engines.vllm.requests import score_body, scores
from polar_proxy.errors import EngineError
from polar_proxy.types import Json, SampleEvent, Sampling, TopLogprob

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DERENDER = "/v1/chat/completions/derender"

_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""A share from 0 to 1, despite the name; versions before 0.10 use the second name."""
_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
# One sample of Prometheus' text format: a name, optional labels, a value.
_METRIC = re.compile(rf"^({'|'.join((*_KV_USAGE, _WAITING, _RUNNING))})(?:\{{[^\n]*\}})? +([^ \n]+)", re.MULTILINE)


class VllmClient(OpenAIClient):
    """A vLLM server. `model` goes into every request body; the probe sets it if the user named none."""

    def __init__(self, url: str, api_key: str | None = None, *, model: str | None = None) -> None:
        super().__init__(url, api_key)
        self.model = model or ""

    async def send(self, method: str, path: str, body: Json | None = None) -> HttpResponse:
        return await super().send(method, path, None if body is None else {"model": self.model, **body})

    async def chat(self, body: Json) -> Json:
        """Return the whole answer to a chat."""
        answer = await self.json("POST", CHAT, body)
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise EngineError(f"{self.name} answered a chat without choices.")
        return answer

    async def events(self, path: str, body: Json) -> list[SampleEvent]:
        """Return all events of a streamed answer."""
        decoder = ChunkDecoder(Sampling(), self.name)
        events: list[SampleEvent] = []
        response = await self.post(path, {**body, "stream": True})
        try:
            async for chunks in self.chunks(response, stream=True):
                events += decoder.feed(chunks)
            events += decoder.end()
            await self.finish(response)
        finally:
            response.close()
        return events

    async def tokenize(self, body: Json) -> list[int]:
        """Return the ids of `/tokenize`, of a rendered conversation (`messages`) or a text (`prompt`)."""
        return list(self.field(await self.json("POST", "/tokenize", body), "tokens"))

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens that the tokenizer adds."""
        return await self.tokenize({"prompt": text, "add_special_tokens": False})

    async def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included."""
        body = {"tokens": [int(token) for token in token_ids]}
        return str(self.field(await self.json("POST", "/detokenize", body), "prompt"))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of token_ids[1:]. The server samples one extra token."""
        return scores(token_ids, await self.json("POST", COMPLETIONS, score_body(token_ids)), self.name)

    async def weight_version(self) -> str:
        """Return the policy version that `/weight_info` reports (in development mode only)."""
        return str(self.field(await self.json("GET", "/weight_info"), "weight_version"))

    async def load(self) -> EngineLoad | None:
        """Return the load that `/metrics` reports; None without metrics (`--disable-log-stats`)."""
        response = await self.send("GET", "/metrics")
        text = await self.read(response)
        return parse_load(text.decode(errors="replace")) if response.status == 200 else None

    def field(self, answer: Any, name: str) -> Any:
        """Return a field of an answer. Raises EngineError if it is missing."""
        value = answer.get(name) if isinstance(answer, dict) else None
        if value is None:
            raise EngineError(f"{self.name} sent an answer without {name!r}.")
        return value


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
        """`separator` is a special token whose text occurs in no other; it lets one request decode many tokens."""
        self._client = client
        self._separator = separator
        self._table: dict[int, str] = {}

    async def add_texts(self, events: list[SampleEvent]) -> list[SampleEvent]:
        """Return the events with the texts of their alternatives, and of tokens that the server sent without text."""
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
