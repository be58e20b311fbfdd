"""The one fake engine for in-process tests: answers what a script says, token by token, with real ids.

Its tokenizer is bytes (id = byte + 3) with 1 = start of turn and 2 = end of turn, so any test can check ids by hand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, SampleEvent, TokenIds, ToolCall, ToolDelta

START, END = 1, 2
Reply = str | ToolCall | Sequence[ToolCall] | Exception
Script = Callable[[EngineRequest], Reply]

INFO = EngineInfo(
    engine="scripted",
    version="1",
    model="scripted-model",
    context_length=1_000_000,
    template_hash="0" * 16,
    logprob_mode="processed",
    capabilities=frozenset({"token_ids", "logprobs", "tools", "token_prompt"}),
    eos_token_ids=(END,),
)


def encode(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def decode(ids: Sequence[int]) -> str:
    return bytes(token - 3 for token in ids if token > 2).decode(errors="replace")


def logprob(token: int) -> float:
    """The recorded log-probability of a token: a number that tells which token it belongs to."""
    return -token / 1000


def as_text(reply: Reply) -> str:
    """What the model 'samples' for a reply: Hermes tool calls as text."""
    if isinstance(reply, str):
        return reply
    assert not isinstance(reply, Exception)
    calls = [reply] if isinstance(reply, ToolCall) else reply
    return "".join(
        "<tool_call>" + json.dumps({"name": c.name, "arguments": json.loads(c.arguments)}) + "</tool_call>"
        for c in calls
    )


class ScriptedEngine(Engine):
    """`script(request)` gives each answer. `delay` seconds pass before each token; `fail_after` tokens it breaks."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        delay: float = 0.0,
        fail_after: int | None = None,
        info: EngineInfo = INFO,
    ) -> None:
        self._script = script or (lambda request: "hello")
        self._info = info
        self._delay = delay
        self._fail_after = fail_after
        self.requests: list[EngineRequest] = []
        self.aborted = 0
        self.finished = 0
        self.sampled = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        ids: list[int] = []
        for message in request.messages:
            said = message.content if isinstance(message.content, str) else json.dumps(message.content or "")
            text = said + (as_text(message.tool_calls) if message.tool_calls else "")
            ids += [START, *encode(f"{message.role}:{text}"), END]
        return [*ids, START, *encode("assistant:")] if generation else ids

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: TokenIds | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        self.requests.append(request)
        if prompt is not None:
            ids = prompt.tolist()
        elif isinstance(request, ChatRequest):
            ids = await self.render(request)
        else:
            ids = encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        finished = False
        try:
            for index in range(request.sampling.n):
                async for event in self._choice(request, index):
                    if index == 0 and ids:
                        event, ids = _with_prompt(event, ids), []
                    yield event
            finished = True
        finally:
            self.finished += finished
            self.aborted += not finished

    async def _choice(self, request: EngineRequest, index: int) -> AsyncGenerator[SampleEvent, None]:
        reply = self._script(request)
        if isinstance(reply, Exception):
            raise reply
        ids = [*encode(as_text(reply)), END]
        limit = request.sampling.max_tokens
        reason = "stop" if isinstance(reply, str) else "tool_calls"
        if limit is not None and len(ids) > limit:
            ids, reason = ids[:limit], "length"
        calls = [] if isinstance(reply, str) else [reply] if isinstance(reply, ToolCall) else list(reply)
        for position, token in enumerate(ids):
            if self._delay:
                await asyncio.sleep(self._delay)
            if self._fail_after is not None and position >= self._fail_after:
                raise EngineError("the scripted engine broke")
            self.sampled += 1
            last = position == len(ids) - 1
            yield SampleEvent(
                index=index,
                text=decode([token]) if isinstance(reply, str) else "",
                tool_calls=tuple(ToolDelta(i, c.id, c.name, c.arguments) for i, c in enumerate(calls)) if last else (),
                token_ids=(token,),
                logprobs=(logprob(token),),
                tokens=(decode([token]),) if request.sampling.logprobs else (),
                finish_reason=reason if last else None,
            )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [logprob(token) for token in token_ids[1:]]

    async def decode(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids)

    async def health(self) -> str | None:
        return None


def _with_prompt(event: SampleEvent, prompt: list[int]) -> SampleEvent:
    return replace(event, prompt_ids=tuple(prompt))
