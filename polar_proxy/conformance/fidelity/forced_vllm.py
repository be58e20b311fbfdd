"""vLLM whose answers are given texts: everything but the choice of the tokens is the real server's.

Template, tokenizer, parsers, prompts and log-probabilities are vLLM's own. Which tokens are sampled is said with each
request to a plugin in the server (`vllm_plugin/polar_forced_tokens.py`), for conversations and for exact prompts alike.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from polar_proxy.conformance.fidelity.answers import pieces, spoken
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.openai_client import OpenAIClient
from polar_proxy.engines.scripted import Reply, Script
from polar_proxy.engines.vllm.engine import VllmEngine
from polar_proxy.errors import EngineError
from polar_proxy.types import EngineRequest, Json, SampleEvent, TokenIds

PLUGIN = Path(__file__).resolve().parent.parent / "vllm_plugin"
"""To be put on the server's PYTHONPATH, with `--logits-processors` and `LOGITS_PROCESSOR`."""
LOGITS_PROCESSOR = "polar_forced_tokens:ForcedTokens"
CUT_EVERY = 40
"""Characters between two places where the tokens of an answer are not the tokenizer's own, on average."""


class _ForcingClient(OpenAIClient):
    """Adds fields to the bodies of some routes."""

    template: str | None = None
    forced: tuple[int, ...] = ()

    async def send(self, method: str, path: str, body: Json | None = None) -> HttpResponse:
        if body is not None:
            if self.template is not None and "messages" in body:
                body = {**body, "chat_template": self.template}
            if self.forced and path in ("/v1/chat/completions", "/v1/completions"):
                body = {**body, "vllm_xargs": {"forced_ids": list(self.forced)}}
        return await super().send(method, path, body)


class ForcedVllmEngine(VllmEngine):
    """`script(request)` gives each answer, and vLLM is made to sample it.

    Raises EngineError on entering when the server has no such plugin. `template` replaces the model's chat template
    (the server needs `--trust-request-chat-template`). `cut_every` is that of `awkward.pieces`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        script: Script | None = None,
        template: str | None = None,
        cut_every: int = CUT_EVERY,
    ) -> None:
        super().__init__(url, model=model)
        self.script: Script = script or (lambda request: Reply("This is vLLM, and it says what it is told to."))
        self._cut_every = cut_every
        self._forcing = _ForcingClient(url, None)
        self._forcing.template = template
        self._http = self._forcing
        self._pieces: dict[str, list[int]] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self._prove()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: TokenIds | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        reply = self.script(request)
        await asyncio.sleep(reply.wait)
        if reply.error is not None:
            raise reply.error
        ids = await self.tokens(spoken(reply))
        async with aclosing(self._as_told(ids).really(request, stream=stream, prompt=prompt)) as events:
            async for event in events:
                yield event

    def really(
        self, request: EngineRequest, *, stream: bool, prompt: TokenIds | None
    ) -> AsyncGenerator[SampleEvent, None]:
        """vLLM's own sampling."""
        return super().sample(request, stream=stream, prompt=prompt)

    async def tokens(self, text: str) -> tuple[int, ...]:
        """The ids that an answer is sampled as, its end of turn included. Raises EngineError where they do not read as
        the text."""
        ids: list[int] = []
        for piece in pieces(text, every=self._cut_every):
            if piece not in self._pieces:
                self._pieces[piece] = await self._encoded(piece)
            ids += self._pieces[piece]
        if (read := await self.decode(ids)) != text:
            raise EngineError(f"The tokenizer cannot be cut: {text!r} reads as {read!r}.")
        return (*ids, self.info.eos_token_ids[0])

    def _as_told(self, ids: tuple[int, ...]) -> ForcedVllmEngine:
        """This engine for one request."""
        one = copy.copy(self)
        one._forcing = copy.copy(self._forcing)
        one._forcing.forced = ids
        one._http = one._forcing
        return one

    async def _encoded(self, text: str) -> list[int]:
        body = {"model": self.info.model, "prompt": text, "add_special_tokens": False}
        answer: Any = await self._http.json("POST", "/tokenize", body)
        return list(answer["tokens"])

    async def _prove(self) -> None:
        """Two tokens that no model would say."""
        ids = (await self.tokens("~}~"))[:-1]
        body = {"model": self.info.model, "prompt": "a", "max_tokens": len(ids), "return_token_ids": True}
        answer = await self._as_told(ids)._http.json("POST", "/v1/completions", body)
        if tuple(answer["choices"][0]["token_ids"]) != ids:
            raise EngineError(
                f"{self._who} does not sample what it is told to: start it with PYTHONPATH={PLUGIN} and "
                f"--logits-processors {LOGITS_PROCESSOR}."
            )
