"""A vLLM engine that samples given texts; everything except the choice of tokens is the real server's.

Template, tokenizer, parsers, prompts and log-probabilities are vLLM's own. Each request carries the tokens to sample,
for a plugin in the server (`vllm_plugin/polar_forced_tokens.py`), for conversations and for exact prompts alike.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Self

from polar_proxy.conformance.fidelity.answers import qwen_text, split_randomly
from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.scripted import Script, ScriptedReply
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.engines.vllm.client import CHAT, COMPLETIONS, VllmClient
from polar_proxy.errors import EngineError
from polar_proxy.types import EngineRequest, Json, SampleEvent

PLUGIN = Path(__file__).resolve().parent.parent / "vllm_plugin"
"""Folder for the server's PYTHONPATH, used with `--logits-processors` and `LOGITS_PROCESSOR`."""
LOGITS_PROCESSOR = "polar_forced_tokens:ForcedTokens"
CUT_EVERY = 40
"""Average distance, in characters, between two places where an answer is split unlike the tokenizer would split it."""


class _ForcingClient(VllmClient):
    """Adds a chat template and the tokens to sample to the bodies of requests."""

    def __init__(self, url: str, *, model: str | None, template: str | None) -> None:
        super().__init__(url, model=model)
        self._template = template
        self._forced_ids: tuple[int, ...] = ()

    def forcing(self, ids: tuple[int, ...]) -> _ForcingClient:
        """Return this client, with the same connections, for one request that samples `ids`."""
        client = copy.copy(self)
        client._forced_ids = ids
        return client

    async def send(self, method: str, path: str, body: Json | None = None) -> HttpResponse:
        if body is not None:
            if self._template is not None and "messages" in body:
                body = {**body, "chat_template": self._template}
            if self._forced_ids and path in (CHAT, COMPLETIONS):
                body = {**body, "vllm_xargs": {"forced_ids": list(self._forced_ids)}}
        return await super().send(method, path, body)


class ForcedVllmEngine(VllmEngine):
    """A vLLM server that samples the answers of `script(request)`.

    Entering raises EngineError if the server lacks the plugin. `template` replaces the model's chat template (which
    needs `--trust-request-chat-template` of the server). `cut_every` is the argument of `answers.split_randomly`.
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
        self.script: Script = script or (lambda request: ScriptedReply("This is vLLM with a scripted answer."))
        self._cut_every = cut_every
        self.client = self._forcing_client = _ForcingClient(url, model=model, template=template)
        self._piece_ids: dict[str, list[int]] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self._verify_plugin()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        reply = ScriptedReply.of(self.script(request))
        await asyncio.sleep(reply.wait)
        if reply.error is not None:
            raise reply.error
        forced = copy.copy(self)
        forced.client = self._forcing_client.forcing(await self.tokens(qwen_text(reply)))
        async with aclosing(VllmEngine.sample(forced, request, stream=stream, prompt=prompt)) as events:
            async for event in events:
                yield event

    async def tokens(self, text: str) -> tuple[int, ...]:
        """Return the token ids of an answer, with its end-of-turn token.

        Raises EngineError if they do not decode to the text.
        """
        ids: list[int] = []
        for piece in split_randomly(text, every=self._cut_every):
            if piece not in self._piece_ids:
                self._piece_ids[piece] = await self.client.encode(piece)
            ids += self._piece_ids[piece]
        if (decoded := await self.decode(ids)) != text:
            raise EngineError(f"The tokenizer does not allow this split: {text!r} decodes as {decoded!r}.")
        return (*ids, self.info.eos_token_ids[0])

    async def _verify_plugin(self) -> None:
        """Force tokens that no model would sample by itself."""
        ids = (await self.tokens("~}~"))[:-1]
        body = {"prompt": "a", "max_tokens": len(ids), "return_token_ids": True}
        answer = await self._forcing_client.forcing(ids).json("POST", COMPLETIONS, body)
        if tuple(answer["choices"][0]["token_ids"]) != ids:
            raise EngineError(
                f"{self.client.name} does not sample the tokens it is given: start it with PYTHONPATH={PLUGIN} and "
                f"--logits-processors {LOGITS_PROCESSOR}."
            )
