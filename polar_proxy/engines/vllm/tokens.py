"""The text of single tokens, asked from the server.

vLLM names an alternative token either by its text, which several tokens may share, or by its id. Polar asks for ids,
which are exact, and looks up what they read as. Only calls whose client wants alternatives pay for this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from polar_proxy.engines.openai_client import OpenAIClient
from polar_proxy.types import SampleEvent, TopLogprob


class TokenTexts:
    """A table of token texts that fills itself; at most as long as the vocabulary."""

    def __init__(self, http: OpenAIClient, model: str, separator: int | None) -> None:
        """`separator` is a special token whose text stands in no other; it lets one request ask for many tokens."""
        self._http = http
        self._model = model
        self._separator = separator
        self._table: dict[int, str] = {}

    async def named(self, events: list[SampleEvent]) -> list[SampleEvent]:
        """The events with the texts of their alternatives, and of their tokens where the server told none."""
        wanted = {other.token_id for event in events for row in event.top for other in row}
        wanted.update(token for event in events for token in event.token_ids)
        await self._learn(token for token in wanted if token >= 0 and token not in self._table)
        text = self._table.get
        return [
            replace(
                event,
                tokens=tuple(
                    said or text(token, "") for token, said in zip(event.token_ids, event.tokens, strict=True)
                ),
                top=tuple(
                    tuple(TopLogprob(o.token_id, text(o.token_id, ""), o.logprob) for o in row) for row in event.top
                ),
            )
            for event in events
        ]

    async def _learn(self, token_ids: Iterable[int]) -> None:
        wanted = sorted(token_ids)
        if not wanted:
            return
        if self._separator is not None:
            asked = [self._separator]
            for token in wanted:
                asked += (token, self._separator)
            mark = await self._decode([self._separator])
            parts = (await self._decode(asked)).split(mark)
            if len(parts) == len(wanted) + 2:
                self._table.update(zip(wanted, parts[1:-1], strict=True))
                return
        texts = await asyncio.gather(*(self._decode([token]) for token in wanted))
        self._table.update(zip(wanted, texts, strict=True))

    async def _decode(self, token_ids: list[int]) -> str:
        answer = await self._http.json("POST", "/detokenize", {"model": self._model, "tokens": token_ids})
        return str(answer.get("prompt", ""))
