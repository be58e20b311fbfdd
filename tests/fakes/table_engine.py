"""An engine that scores by a table: the log-probability of a token depends on the one before it. It samples nothing."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import pairwise

from polar_proxy.engines.base import Engine, ExactPrompt
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, SampleEvent

VOCABULARY = 32
INFO = EngineInfo(
    engine="table",
    version="1",
    model="m",
    context_length=1000,
    template_hash="render:1",
    logprob_mode="raw",
    capabilities=frozenset({"score"}),
    eos_token_ids=(2,),
)


def logprob(previous: int, token: int, temperature: float = 1.0) -> float:
    """log softmax(z / temperature) with z = ((previous * 7 + token * 13) % 29) / 4."""
    logits = [((previous * 7 + other * 13) % 29) / 4 / temperature for other in range(VOCABULARY)]
    return logits[token] - math.log(sum(map(math.exp, logits)))


class TableEngine(Engine):
    """`shift` is added to every number; `silent` positions have none; `versions` are told one after another."""

    def __init__(
        self, info: EngineInfo = INFO, *, shift: float = 0.0, silent: Sequence[int] = (), versions: Sequence[str] = ()
    ) -> None:
        self._info = info
        self._shift = shift
        self._silent = silent
        self._versions = list(versions)
        self.scored: list[int] = []
        """Length of every sequence that was scored."""

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        if len(token_ids) >= self._info.context_length:
            raise RequestError("maximum context length", code="context_length_exceeded")
        self.scored.append(len(token_ids))
        pairs = pairwise(token_ids)
        return [
            math.nan if position in self._silent else logprob(previous, token) + self._shift
            for position, (previous, token) in enumerate(pairs, 1)
        ]

    async def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    async def weight_version(self) -> str | None:
        if len(self._versions) > 1:
            return self._versions.pop(0)
        return self._versions[0] if self._versions else None

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        raise NotImplementedError

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        raise NotImplementedError
        yield  # makes it a generator

    async def health(self) -> str | None:
        return None


def with_length(length: int) -> EngineInfo:
    return replace(INFO, context_length=length)
