"""`scripted`: an engine without a model. It returns the answers of a script, token by token, with token ids.

It is used to check everything except the model: in `polar conformance`, in tests, and when connecting an agent. Its
tokens are bytes (id = byte + 3; 0 is padding, 1 begins a turn, 2 ends it), so any id can be checked by hand, and the
log-probability of an id identifies the id. Reasoning is sampled between `<think>` tags and tool calls between
`<tool_call>` tags, as by the models that it imitates.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from polar_proxy.engines.base import Engine, ExactPrompt
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Message, SampleEvent, ToolCall, ToolDelta

PAD, START, END = 0, 1, 2

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
class ScriptedReply:
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    wait: float = 0.0
    """Seconds before the first event."""
    pace: float = 0.0
    """Seconds before each event."""
    prompt_tokens: int = 0
    """Minimum length of the reported prompt in tokens. A shorter prompt gets padding at its start, so that the client
    believes that its context is full."""
    error: Exception | None = None
    """Error to raise after the rest of the reply, in place of an end-of-turn token."""

    @classmethod
    def of(cls, answer: ScriptedAnswer) -> ScriptedReply:
        """Convert a script's answer (a reply, text, tool call, list of tool calls or exception) to a reply."""
        if isinstance(answer, ScriptedReply):
            return answer
        if isinstance(answer, str):
            return cls(answer)
        if isinstance(answer, Exception):
            return cls(error=answer)
        return cls(calls=(answer,) if isinstance(answer, ToolCall) else tuple(answer))


ScriptedAnswer = ScriptedReply | str | ToolCall | Sequence[ToolCall] | Exception
Script = Callable[[EngineRequest], ScriptedAnswer]


def encode(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode(errors="replace")]


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids; padding and turn marks have no text."""
    return bytes(token - 3 for token in ids if token > END).decode(errors="replace")


def logprob(token: int) -> float:
    """Return the log-probability that the engine reports for a token."""
    return -(token + 1) / 1000


def message_text(message: Message) -> str:
    """Return a message as the model samples or reads it."""
    content = message.content or ""
    content = content if isinstance(content, str) else json.dumps(content)
    reasoning = f"<think>{message.reasoning}</think>" if message.reasoning else ""
    return reasoning + content + "".join(map(call_text, message.tool_calls))


def call_text(call: ToolCall) -> str:
    """Return a tool call as the model samples it."""
    head = json.dumps({"name": call.name})[:-1]
    return f'<tool_call>{head}, "arguments": {call.arguments}}}</tool_call>'


class ScriptedEngine(Engine):
    """An engine that answers with `script(request)`, called once per choice. Without a script it answers "hello".

    `pace`: seconds before each event of a reply, if the reply has no own `pace`."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        info: EngineInfo = INFO,
        pace: float = 0.0,
        tokens_per_event: int = 12,
    ) -> None:
        self.script: Script = script or (lambda request: "hello")
        self._info = info
        self._pace = pace
        self._tokens_per_event = tokens_per_event
        self.requests: list[EngineRequest] = []
        """All requests to sample, in the order of their arrival."""
        self.finished = 0
        """Number of calls that were sampled to their end."""
        self.aborted = 0
        """Number of calls that failed or whose reader stopped reading."""
        self.sampled = 0
        """Number of tokens sampled so far."""

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        ids: list[int] = []
        for tool in request.tools:
            ids += encode(json.dumps(tool))
        for message in request.messages:
            ids += [START, *encode(f"{message.role}:{message_text(message)}"), END]
        return [*ids, START, *encode("assistant:")] if generation else ids

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        self.requests.append(request)
        complete = False
        try:
            prompt_ids: Sequence[int] | None = await self._prompt_ids(request, prompt)
            for index in range(request.sampling.n):
                reply = ScriptedReply.of(self.script(request))
                await asyncio.sleep(reply.wait)
                async for event in self._events(reply, index, request):
                    if prompt_ids is not None:
                        padding = [PAD] * (reply.prompt_tokens - len(prompt_ids))
                        event, prompt_ids = replace(event, prompt_ids=(*padding, *prompt_ids)), None
                    yield event
            complete = True
        finally:
            self.finished += complete
            self.aborted += not complete

    async def _prompt_ids(self, request: EngineRequest, prompt: ExactPrompt | None) -> list[int]:
        if prompt is not None:
            return [int(token) for token in prompt.token_ids]
        if isinstance(request, ChatRequest):
            return await self.render(request)
        return encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)

    async def _events(
        self, reply: ScriptedReply, index: int, request: EngineRequest
    ) -> AsyncGenerator[SampleEvent, None]:
        """Yield one choice in pieces, cut at `max_tokens`. A tool call that is cut is not reported."""
        left = request.sampling.max_tokens
        for event, ids in _pieces(reply, self._tokens_per_event):
            if pace := reply.pace or self._pace:
                await asyncio.sleep(pace)
            if left is not None and len(ids) > left:
                ids = ids[:left]
                event = SampleEvent(text=decode(ids) if event.text else "", finish_reason="length")
            self.sampled += len(ids)
            yield replace(
                event,
                index=index,
                token_ids=tuple(ids),
                logprobs=tuple(logprob(token) for token in ids),
                tokens=tuple(decode([token]) for token in ids) if request.sampling.logprobs else (),
            )
            if event.finish_reason is not None:
                return
            left = None if left is None else left - len(ids)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        return [logprob(token) for token in token_ids[1:]]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; turn marks are shown as the control characters 1 and 2."""
        return bytes(token if token <= END else token - 3 for token in token_ids).decode(errors="replace")

    async def encode(self, text: str) -> list[int]:
        return [byte if byte in (START, END) else byte + 3 for byte in text.encode(errors="replace")]

    async def health(self) -> str | None:
        return None


def _pieces(reply: ScriptedReply, size: int) -> Iterator[tuple[SampleEvent, list[int]]]:
    if reply.reasoning:
        yield SampleEvent(), encode("<think>")
        for text, ids in _split(reply.reasoning, size):
            yield SampleEvent(reasoning=text), ids
        yield SampleEvent(), encode("</think>")
    for text, ids in _split(reply.text, size):
        yield SampleEvent(text=text), ids
    for number, call in enumerate(reply.calls):
        whole = encode(call_text(call))
        tail = len(encode("}</tool_call>"))
        head = len(whole) - tail - len(encode(call.arguments))
        yield SampleEvent(tool_calls=(ToolDelta(number, call.id, call.name),)), whole[:head]
        for text, ids in _split(call.arguments, size):
            yield SampleEvent(tool_calls=(ToolDelta(number, arguments=text),)), ids
        yield SampleEvent(), whole[-tail:]
    if reply.error is not None:
        raise reply.error
    yield SampleEvent(finish_reason="tool_calls" if reply.calls else "stop"), [END]


def _split(text: str, size: int) -> Iterator[tuple[str, list[int]]]:
    """Yield a text in pieces of `size` tokens. If a cut falls within a character, the character belongs to the piece
    with its last byte."""
    ids = encode(text)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        yield decoder.decode(bytes(token - 3 for token in piece)), piece
