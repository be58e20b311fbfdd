"""`scripted`: an engine without a model, which answers what a script says, token by token, with ids of its own.

For checks of everything around the model: `polar conformance`, wiring an agent, demonstrations. Its tokens are bytes
(id = byte + 3; 0 is padding, 1 begins a turn, 2 ends it), so that any id can be checked by hand, and the
log-probability of an id is a number that tells which id it belongs to. Reasoning stands between `<think>` tags and tool
calls between `<tool_call>` tags, as the models do it that this imitates.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from polar_proxy.engines.base import Engine
from polar_proxy.errors import PolarError
from polar_proxy.types import (
    ChatRequest,
    EngineInfo,
    EngineRequest,
    Message,
    SampleEvent,
    TokenIds,
    ToolCall,
    ToolDelta,
)

PAD, START, END = 0, 1, 2
_PIECE = 12
"""Tokens of one event."""

INFO = EngineInfo(
    engine="scripted",
    version="1",
    model="scripted-model",
    context_length=4_000_000,
    template_hash="5c" * 8,
    logprob_mode="processed",
    capabilities=frozenset({"token_ids", "logprobs", "tools", "token_prompt", "score", "continue"}),
    eos_token_ids=(END,),
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the script wants to be answered."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    wait: float = 0.0
    """Seconds before the first token."""
    pace: float = 0.0
    """Seconds before each further event."""
    prompt_tokens: int = 0
    """How long the prompt shall be at least, by padding in front: a client then believes that its context is full."""
    error: PolarError | None = None
    """Raised instead of an answer, after `wait`."""


Script = Callable[[EngineRequest], Reply]


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [byte + 3 for byte in text.encode(errors="replace")]


def decode(ids: Sequence[int]) -> str:
    """Text of token ids; padding and turn marks are nothing."""
    return bytes(token - 3 for token in ids if token > END).decode(errors="replace")


def logprob(token: int) -> float:
    """The log-probability of a token."""
    return -(token + 1) / 1000


def spoken(message: Message) -> str:
    """A message as the model would have said it."""
    content = message.content or ""
    content = content if isinstance(content, str) else json.dumps(content)
    return _thought(message.reasoning or "") + content + "".join(map(_call_text, message.tool_calls))


def _thought(reasoning: str) -> str:
    return f"<think>{reasoning}</think>" if reasoning else ""


def _call_text(call: ToolCall) -> str:
    head = json.dumps({"name": call.name})[:-1]
    return f'<tool_call>{head}, "arguments": {call.arguments}}}</tool_call>'


class ScriptedEngine(Engine):
    """`script(request)` gives each answer; without one every answer is a short text."""

    def __init__(self, script: Script | None = None, *, info: EngineInfo = INFO) -> None:
        self.script: Script = script or (lambda request: Reply("This is the scripted engine of Polar."))
        self._info = info

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        ids: list[int] = []
        for tool in request.tools:
            ids += encode(json.dumps(tool))
        for message in request.messages:
            ids += [START, *encode(f"{message.role}:{spoken(message)}"), END]
        return [*ids, START, *encode("assistant:")] if generation else ids

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: TokenIds | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        reply = self.script(request)
        await asyncio.sleep(reply.wait)
        if reply.error is not None:
            raise reply.error
        if prompt is not None:
            ids = prompt.tolist()
        elif isinstance(request, ChatRequest):
            ids = await self.render(request)
        else:
            ids = encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        start: Sequence[int] | None = [PAD] * (reply.prompt_tokens - len(ids)) + ids
        for index in range(request.sampling.n):
            for event in _events(reply, index, request):
                yield event if start is None else replace(event, prompt_ids=start)
                start = None
                if reply.pace:
                    await asyncio.sleep(reply.pace)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [logprob(token) for token in token_ids[1:]]

    async def decode(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids)

    async def health(self) -> str | None:
        return None


def _events(reply: Reply, index: int, request: EngineRequest) -> Iterator[SampleEvent]:
    """The answer in pieces. Cut at `max_tokens`; a tool call that is cut is not told, for it never was one."""
    left = request.sampling.max_tokens
    show = request.sampling.logprobs
    for event, ids in _pieces(reply, index):
        if left is not None and len(ids) > left:
            yield _event(SampleEvent(index=index, finish_reason="length"), ids[:left], show)
            return
        left = None if left is None else left - len(ids)
        yield _event(event, ids, show)


def _event(event: SampleEvent, ids: Sequence[int], show: bool) -> SampleEvent:
    return replace(
        event,
        token_ids=tuple(ids),
        logprobs=tuple(logprob(token) for token in ids),
        tokens=tuple(decode([token]) for token in ids) if show else (),
    )


def _pieces(reply: Reply, index: int) -> Iterator[tuple[SampleEvent, list[int]]]:
    """Events with the ids that they were sampled as."""
    if reply.reasoning:
        yield SampleEvent(index=index), encode("<think>")
        for text, ids in _cut(reply.reasoning):
            yield SampleEvent(index=index, reasoning=text), ids
        yield SampleEvent(index=index), encode("</think>")
    for text, ids in _cut(reply.text):
        yield SampleEvent(index=index, text=text), ids
    for number, call in enumerate(reply.calls):
        whole = encode(_call_text(call))
        tail = len(encode("}</tool_call>"))
        head = len(whole) - tail - len(encode(call.arguments))
        yield SampleEvent(index=index, tool_calls=(ToolDelta(number, call.id, call.name),)), whole[:head]
        for text, ids in _cut(call.arguments):
            yield SampleEvent(index=index, tool_calls=(ToolDelta(number, arguments=text),)), ids
        yield SampleEvent(index=index), whole[-tail:]
    yield SampleEvent(index=index, finish_reason="tool_calls" if reply.calls else "stop"), [END]


def _cut(text: str) -> Iterator[tuple[str, list[int]]]:
    """A text in pieces of a few tokens; a character that is cut comes with the piece that completes it."""
    ids = encode(text)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for start in range(0, len(ids), _PIECE):
        piece = ids[start : start + _PIECE]
        yield decoder.decode(bytes(token - 3 for token in piece)), piece
