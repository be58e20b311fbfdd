"""A llama-server that samples given texts; everything except the choice of tokens is the real server's."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing

from polar_proxy.conformance.awkward_answers import qwen_text, split_randomly
from polar_proxy.conformance.forced_vllm import CUT_EVERY
from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.llamacpp import LlamaCppEngine
from polar_proxy.engines.llamacpp.engine import AnswerState
from polar_proxy.engines.scripted import Script, ScriptedReply
from polar_proxy.types import EngineRequest, Json, SampleEvent


class ForcedLlamaEngine(LlamaCppEngine):
    """Samples the answers of `script(request)`: a grammar of token ids allows nothing else.

    Log-probabilities are those of the model without the grammar, at temperature 1.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.script: Script = lambda request: ScriptedReply("This is a scripted answer.")
        self._forced_ids: list[int] = []

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        reply = ScriptedReply.of(self.script(request))
        await asyncio.sleep(reply.wait)
        if reply.error is not None:
            raise reply.error
        forced = copy.copy(self)
        pieces = split_randomly(qwen_text(reply), every=CUT_EVERY)
        forced._forced_ids = [token for piece in pieces for token in await self.encode(piece)]
        async with aclosing(LlamaCppEngine.sample(forced, request, stream=stream, prompt=prompt)) as events:
            async for event in events:
                yield event

    def _body(self, answer: AnswerState) -> Json:
        left = self._forced_ids[len(answer.ids) :]
        grammar = " ".join(f"<[{token}]>" for token in left) or '""'
        return {**super()._body(answer), "grammar": f"root ::= {grammar}", "post_sampling_probs": False}
