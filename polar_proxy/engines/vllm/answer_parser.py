"""How an answer that was sampled from exact ids is read: reasoning, text and tool calls out of `/v1/completions`.

The chat route parses its answers, completions do not. Which of two readers is used for a server was proved when it was
entered (`probe_parsers.py`): the one that said of forced answers what the server's own chat route says of them.

* `HermesAnswerParser`: Polar's own parser, which follows the text as it comes. A call is told when it is whole; one
  that is
  cut or malformed is told as the text that it was.
* `DerenderAnswerParser`: the server's own parser, behind `/v1/chat/completions/derender` (vLLM with
  `--enable-scale-out`). It
  keeps nothing between two requests and parses the answer from its beginning each time, so it is asked at growing
  distances: all requests together parse an answer some eight times over, and text lags an eighth behind.

Invariant: ids, log-probabilities and their order are those of the events read; only text, reasoning, tool calls and
the finish reason are changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from polar_proxy.engines.hermes import HermesParser, Reasoning
from polar_proxy.engines.openai_client import OpenAIClient
from polar_proxy.engines.vllm.requests import chat_body
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, Sampling, TokenIds, ToolDelta

DERENDER = "/v1/chat/completions/derender"
_LAG = 8
"""A request for parsing is worth this fraction of the answer, and at least so many tokens."""

PromptTail = Literal["open", "closed", "none"]
"""Whether a prompt's last tokens open reasoning, close it, or say nothing of it."""


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """How the answers of a server are read, under one set of template options."""

    kind: Literal["hermes", "derender"]
    reasoning: Reasoning
    """For the Hermes parser."""
    tools: bool
    """The server reads tool calls."""
    special_plain: bool
    special_tools: bool
    """Its chats show special tokens, without tools and with them."""
    tail: PromptTail
    """How the prompts ended with which this was proved."""

    def shows_special(self, request: ChatRequest) -> bool:
        return self.special_tools if uses_tools(request) else self.special_plain


class AnswerParser(Protocol):
    async def read(self, event: SampleEvent) -> SampleEvent:
        """The event with its raw text read."""


def uses_tools(request: ChatRequest) -> bool:
    """Whether the answer is searched for calls."""
    return bool(request.tools) and request.tool_choice != "none"


def cannot_continue(why: str) -> RequestError:
    """The refusal to sample a conversation from exact ids."""
    return RequestError(f"This engine cannot continue from exact tokens: {why}", code="cannot_continue")


def make_answer_parser(
    http: OpenAIClient, model: str, request: ChatRequest, prompt: TokenIds, reading: ParserConfig
) -> AnswerParser:
    """The reader of one call. Raises RequestError for what cannot be read."""
    if uses_tools(request) and not reading.tools:
        raise cannot_continue("the server calls no tools. Start vLLM with --enable-auto-tool-choice.")
    if reading.kind == "hermes":
        return HermesAnswerParser(request, reading)
    if request.sampling.stop:
        raise cannot_continue("the server's parser is given tokens, and would show what stands behind a stop string.")
    return DerenderAnswerParser(http, model, request, prompt)


class HermesAnswerParser:
    def __init__(self, request: ChatRequest, reading: ParserConfig) -> None:
        self._tools = uses_tools(request)
        self._one_call = request.parallel_tool_calls is False
        self._reasoning = reading.reasoning
        self._parsers: dict[int, HermesParser] = {}

    async def read(self, event: SampleEvent) -> SampleEvent:
        finish = event.finish_reason
        if not event.text and finish is None:
            return event
        parser = self._parsers.get(event.index)
        if parser is None:
            parser = self._parsers[event.index] = HermesParser(tools=self._tools, reasoning=self._reasoning)
        parsed = parser.feed(event.text)
        text, reasoning, calls = parsed.text, parsed.reasoning, parsed.tool_calls
        if finish is not None:
            rest = parser.close()
            text, reasoning, calls = text + rest.text, reasoning + rest.reasoning, calls + rest.tool_calls
            finish = "tool_calls" if finish == "stop" and parser.calls else finish
        if self._one_call:  # as the chat route: the others are not told
            calls = tuple(call for call in calls if call.index == 0)
        return replace(event, text=text, reasoning=reasoning, tool_calls=calls, finish_reason=finish)


@dataclass(slots=True)
class _ChoiceState:
    """One choice: the tokens that were not parsed yet, how many there are in all, and the server's own notes."""

    waiting: list[int]
    count: int = 0
    state: Json | None = None


class DerenderAnswerParser:
    def __init__(self, http: OpenAIClient, model: str, request: ChatRequest, prompt: TokenIds) -> None:
        self._http = http
        self._who = f"The engine at {http.url}"
        plain = replace(request, messages=(Message("user", ""),), sampling=Sampling())
        self._frame: Json = {
            "stream": True,
            "model": model,
            "prompt_token_ids": prompt.tolist(),
            "chat_request": chat_body(model, plain, stream=True),
        }
        self._choices: dict[int, _ChoiceState] = {}

    async def read(self, event: SampleEvent) -> SampleEvent:
        spoken = self._choices.setdefault(event.index, _ChoiceState([]))
        spoken.waiting += event.token_ids
        spoken.count += len(event.token_ids)
        finish = event.finish_reason
        if finish is None and len(spoken.waiting) < max(_LAG, spoken.count // _LAG):
            return replace(event, text="")
        if finish == "stop":
            spoken.waiting = spoken.waiting[:-1]  # the token at which it ends has no text
        said = await self._derendered(spoken, event.index, finish)
        spoken.waiting = []
        delta = said.get("delta") or {}
        return replace(
            event,
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
            tool_calls=tuple(map(_tool_delta, delta.get("tool_calls") or ())),
            finish_reason=said.get("finish_reason") if finish is not None else None,
        )

    async def _derendered(self, spoken: _ChoiceState, index: int, finish: str | None) -> Json:
        choice = {"index": index, "token_ids": spoken.waiting, "finish_reason": finish}
        answer = await self._http.json(
            "POST",
            DERENDER,
            {
                **self._frame,
                "generate_chunk": {"request_id": "polar", "choices": [choice]},
                "stream_state": spoken.state,
            },
        )
        try:
            spoken.state = answer["stream_state"]
            choices: list[Json] = answer["chunk"]["choices"]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self._who} parsed an answer into an unknown shape: {error!r}.") from error
        return choices[0] if choices else {"finish_reason": finish}


def _tool_delta(call: Any) -> ToolDelta:
    function = call.get("function") or {}
    return ToolDelta(
        index=call.get("index", 0),
        id=call.get("id"),
        name=function.get("name"),
        arguments=function.get("arguments") or "",
    )
