"""A scripted engine that scores by a table: the log-probability of a token depends on the token before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import RequestError
from polar_proxy.types import EngineInfo
from tests.factories import engine_info

VOCABULARY = 32
INFO = engine_info(engine="table", context_length=1000, template_hash="render:1", capabilities=frozenset({"score"}))


def logprob(previous: int, token: int, temperature: float = 1.0) -> float:
    """Return log softmax(z / temperature) with z = ((previous * 7 + token * 13) % 29) / 4."""
    logits = [((previous * 7 + other * 13) % 29) / 4 / temperature for other in range(VOCABULARY)]
    return logits[token] - math.log(sum(map(math.exp, logits)))


class TableEngine(ScriptedEngine):
    """`shift` is added to every log-probability; `silent` positions have none; `versions` are reported in turn."""

    def __init__(
        self, info: EngineInfo = INFO, *, shift: float = 0.0, silent: Sequence[int] = (), versions: Sequence[str] = ()
    ) -> None:
        super().__init__(info=info)
        self._shift = shift
        self._silent = silent
        self._versions = list(versions)
        self.scored: list[int] = []
        """Length of every sequence that was scored."""

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        if len(token_ids) >= self.info.context_length:
            raise RequestError("maximum context length", code="context_length_exceeded")
        self.scored.append(len(token_ids))
        return [
            math.nan if position in self._silent else logprob(previous, token, temperature) + self._shift
            for position, (previous, token) in enumerate(pairwise(token_ids), 1)
        ]

    async def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    async def weight_version(self) -> str | None:
        if len(self._versions) > 1:
            return self._versions.pop(0)
        return self._versions[0] if self._versions else None
