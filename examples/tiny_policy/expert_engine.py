"""The expert as an engine, so that Polar records its demonstrations like any other policy's samples.

    polar run swe-task --engine examples.tiny_policy.expert_engine:ExpertEngine --seed 1000000 --instances 100

Token ids are those of polar-tiny: the prompt as its template renders it, the answer in its tokens. The
log-probabilities are 0.0, which is exact for a deterministic expert. They belong to the expert, so do not use its
traces as samples of polar-tiny in an importance ratio.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from examples.tiny_policy.expert import Action, LostError, next_action
from polar_proxy.engines.base import Engine, ExactPrompt
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.hermes import HermesParser
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, SampleEvent

VERSION = "1"


class ExpertEngine(Engine):
    """Plays the family `swe-task` through any harness whose prompt is mini-swe-agent's."""

    def __init__(self) -> None:
        self._tokenizer: Any = None

    async def __aenter__(self) -> ExpertEngine:
        from transformers import AutoTokenizer

        self._tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, POLAR_TINY)
        return self

    @property
    def info(self) -> EngineInfo:
        template: str = self._tokenizer.chat_template
        return EngineInfo(
            engine="expert",
            version=VERSION,
            model="swe-task-expert",
            context_length=65536,
            template_hash=hashlib.sha256(template.encode()).hexdigest(),
            logprob_mode="raw",
            capabilities=frozenset({"token_ids", "logprobs", "tools"}),
            eos_token_ids=(self._tokenizer.eos_token_id,),
        )

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [message.to_openai() for message in request.messages],
            tools=list(request.tools) or None,
            tokenize=False,
            add_generation_prompt=generation,
        )
        return self._encode(text)

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        # The answer is complete at once, so there is one event, streamed or not.
        del stream, prompt
        if not isinstance(request, ChatRequest):
            raise RequestError("The expert answers conversations only, not raw prompts.")
        try:
            action: Action = next_action([message.to_openai() for message in request.messages])
        except LostError as error:
            raise EngineError(f"The expert cannot continue: {error}.", status=400) from error
        answer = action.answer()
        ids = (*self._encode(answer), self._tokenizer.eos_token_id)
        event = SampleEvent(
            text=answer,
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            finish_reason="stop",
            prompt_ids=tuple(await self.render(request)),
        )
        yield HermesParser(tools=bool(request.tools), reasoning="tags").parse(event)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise EngineError("The expert is not a language model and cannot score.")

    async def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    async def health(self) -> str | None:
        return None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
