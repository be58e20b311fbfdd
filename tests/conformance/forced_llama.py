"""A llama-server that samples given texts; everything except the choice of tokens is the real server's."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from polar_proxy.conformance.awkward_answers import qwen_text, split_randomly
from polar_proxy.conformance.forced_vllm import CUT_EVERY, forced_reply
from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.llamacpp import LlamaCppEngine
from polar_proxy.engines.llamacpp.engine import AnswerState
from polar_proxy.engines.scripted import Script, ScriptedReply
from polar_proxy.types import EngineRequest, Json, SampleEvent

_BEYOND_ASCII = re.compile(r"([^\x00-\x7f]+)")


class ForcedLlamaEngine(LlamaCppEngine):
    """Samples the answers of `script(request)`: a grammar allows nothing else.

    ASCII is forced as token ids. llama.cpp's grammars take no ids of tokens that end within a character, so that other
    text is forced as text, and the model chooses its tokens. Log-probabilities are those without the grammar, at
    temperature 1.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.script: Script = lambda request: ScriptedReply("This is a scripted answer.")
        self._forced: list[tuple[int, str]] = []
        """Token id and text; for text beyond ASCII the id is -1."""

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        reply = await forced_reply(self.script, request)
        forced = copy.copy(self)
        forced._forced = await self._forced_parts(qwen_text(reply))
        async with aclosing(LlamaCppEngine.sample(forced, request, stream=stream, prompt=prompt)) as events:
            async for event in events:
                yield event

    async def _forced_parts(self, text: str) -> list[tuple[int, str]]:
        parts: list[tuple[int, str]] = []
        for run in _BEYOND_ASCII.split(text):
            if _BEYOND_ASCII.fullmatch(run):
                parts.append((-1, run))
                continue
            for piece in split_randomly(run, every=CUT_EVERY):
                parts += [(token, await self.decode([token])) for token in await self.encode(piece)]
        return parts

    def _body(self, answer: AnswerState) -> Json:
        done = len(answer.text)
        elements = []
        for token, text in self._forced:
            if done >= len(text):
                done -= len(text)
                continue
            elements.append(f"<[{token}]>" if token >= 0 else json.dumps(text[done:], ensure_ascii=False))
            done = 0
        grammar = " ".join(elements) or '""'
        return {**super()._body(answer), "grammar": f"root ::= {grammar}", "post_sampling_probs": False}
