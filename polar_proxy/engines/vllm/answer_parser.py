"""Parse answers that were sampled from exact ids: reasoning, text and tool calls out of `/v1/completions`.

The chat route parses its answers; completions are raw text. Polar parses them with the parser that was found for this
server when the engine was entered (`parser_proof.py`): on a set of answers it agreed with the server's own chat route.

* `HermesAnswerParser`: Polar's own parser, which follows the text as it arrives. A tool call is reported when it is
  complete; a cut or malformed one is reported as text.
* `DerenderAnswerParser`: the server's own parser at `/v1/chat/completions/derender` (vLLM with `--enable-scale-out`).
  The server parses the answer from its beginning at each request, so the requests are sent at growing intervals. All of
  them together parse an answer about eight times, and the text lags behind by an eighth.

Invariant: ids, log-probabilities and their order are those of the events given; only text, reasoning, tool calls and
the finish reason change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from polar_proxy.engines.base import CannotContinueError, uses_tools
from polar_proxy.engines.hermes import HermesParser, Reasoning
from polar_proxy.engines.openai_stream import tool_delta
from polar_proxy.engines.vllm.client import DERENDER, VllmClient, chat_body
from polar_proxy.errors import EngineError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, Sampling, TokenIds

_DERENDER_INTERVAL = 8
"""The server's parser is asked when at least this many tokens, and at least an eighth of the answer, are new."""

PromptTail = Literal["open", "closed", "none"]
"""Whether a prompt's last tokens open reasoning, close it, or do neither."""


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """How answers of a server are parsed under one set of template options."""

    kind: Literal["hermes", "derender"]
    reasoning: Reasoning
    """Used by the Hermes parser only."""
    tools: bool
    """The server parses tool calls."""
    special_without_tools: bool
    special_with_tools: bool
    """Whether chats of the server show special tokens, for requests without and with tools."""
    tail: PromptTail
    """The tail of the prompts with which this configuration was verified."""

    def shows_special(self, request: ChatRequest) -> bool:
        return self.special_with_tools if uses_tools(request) else self.special_without_tools


class AnswerParser(Protocol):
    """Parser of one answer (all choices of one call)."""

    async def parse(self, event: SampleEvent) -> SampleEvent:
        """Return the event with its raw text parsed."""


def make_answer_parser(
    client: VllmClient, request: ChatRequest, prompt: TokenIds, config: ParserConfig
) -> AnswerParser:
    """Return the parser of one call's answer. Raises CannotContinueError if the answer cannot be parsed."""
    if uses_tools(request) and not config.tools:
        raise CannotContinueError("the server parses no tool calls. Start vLLM with --enable-auto-tool-choice.")
    if config.kind == "hermes":
        return HermesAnswerParser(request, config)
    if request.sampling.stop:
        raise CannotContinueError("the server's parser reads whole tokens, so it would show text after a stop string.")
    return DerenderAnswerParser(client, request, prompt)


class HermesAnswerParser:
    def __init__(self, request: ChatRequest, config: ParserConfig) -> None:
        self._tools = uses_tools(request)
        self._one_call = request.parallel_tool_calls is False
        self._reasoning = config.reasoning
        self._parsers: dict[int, HermesParser] = {}

    async def parse(self, event: SampleEvent) -> SampleEvent:
        parser = self._parsers.get(event.index)
        if parser is None:
            parser = self._parsers[event.index] = HermesParser(tools=self._tools, reasoning=self._reasoning)
        parsed = parser.parse(event)
        if self._one_call and parsed.tool_calls:  # like the chat route, which drops the others
            return replace(parsed, tool_calls=tuple(call for call in parsed.tool_calls if call.index == 0))
        return parsed


@dataclass(slots=True)
class _DerenderState:
    """Progress of one choice: its unparsed tokens, its number of tokens, and the server's own parser state."""

    pending: list[int]
    count: int = 0
    server_state: Json | None = None


class DerenderAnswerParser:
    def __init__(self, client: VllmClient, request: ChatRequest, prompt: TokenIds) -> None:
        self._client = client
        plain = replace(request, messages=(Message("user", ""),), sampling=Sampling())
        self._body: Json = {
            "stream": True,
            "prompt_token_ids": prompt.tolist(),
            "chat_request": {"model": client.model, **chat_body(plain, stream=True)},
        }
        self._choices: dict[int, _DerenderState] = {}

    async def parse(self, event: SampleEvent) -> SampleEvent:
        choice = self._choices.setdefault(event.index, _DerenderState([]))
        choice.pending += event.token_ids
        choice.count += len(event.token_ids)
        finish = event.finish_reason
        if finish is None and len(choice.pending) < max(_DERENDER_INTERVAL, choice.count // _DERENDER_INTERVAL):
            return replace(event, text="")
        if finish == "stop":
            del choice.pending[-1:]  # the end-of-turn token has no text
        parsed = await self._derender(choice, event.index, finish)
        choice.pending = []
        delta = parsed.get("delta") or {}
        return replace(
            event,
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
            tool_calls=tuple(tool_delta(call, 0) for call in delta.get("tool_calls") or ()),
            finish_reason=parsed.get("finish_reason") if finish is not None else None,
        )

    async def _derender(self, choice: _DerenderState, index: int, finish: str | None) -> Json:
        chunk = {"index": index, "token_ids": choice.pending, "finish_reason": finish}
        body = {
            **self._body,
            "generate_chunk": {"request_id": "polar", "choices": [chunk]},
            "stream_state": choice.server_state,
        }
        answer = await self._client.json("POST", DERENDER, body)
        try:
            choice.server_state = answer["stream_state"]
            choices: list[Json] = answer["chunk"]["choices"]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self._client.name} parsed an answer into an unknown shape: {error!r}.") from error
        return choices[0] if choices else {"finish_reason": finish}
