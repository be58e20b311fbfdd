"""Parse answers that were sampled from exact ids: find the reasoning, text and tool calls in a raw completion.

The chat route parses its answers, but `/v1/completions` returns raw text, which Polar has to parse. For this, the
engine looks for a parser that agrees with the server's own chat route on a set of answers (`parser_proof.py`).

* `HermesAnswerParser`: Polar's own parser, which follows the text as it arrives. A tool call is reported when it is
  complete; a cut or malformed one is reported as text.
* `ProcessAnswerParser`: vLLM's own parsers in a side process (`parser_process.py`). They parse each token as the chat
  route does.
* `DerenderAnswerParser`: the server's own parser at `/v1/chat/completions/derender` (vLLM with `--enable-scale-out`). A
  whole answer is parsed in one request. For a stream, the server parses the answer from its beginning at each request,
  so the requests are sent at growing intervals. In all, the server does the work of about eight parses of the whole
  answer. At most the newest eighth of the answer is held back meanwhile. Some of vLLM's parsers lose a call
  that arrives in one piece. If the server uses such a parser, a stream is parsed as a whole at its end.

Invariant: a parser keeps the token ids, the log-probabilities and the order of the events. It changes only text,
reasoning, tool calls and the finish reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from polar_proxy.engines.base import CannotContinueError, uses_tools
from polar_proxy.engines.hermes import HermesParser, Reasoning
from polar_proxy.engines.openai_stream import tool_delta
from polar_proxy.engines.vllm.client import DERENDER, VllmClient, chat_body
from polar_proxy.engines.vllm.parser_process import ParsedStream, ParserProcess, Parsers
from polar_proxy.errors import EngineError
from polar_proxy.types import (
    ChatRequest,
    Json,
    Message,
    SampleEvent,
    Sampling,
    TokenIds,
    ToolCall,
    ToolDelta,
)

_DERENDER_INTERVAL = 8
"""Minimum number of unparsed tokens for a request to the derender route. In addition, at least an eighth of the answer
so far must be unparsed."""

PromptTail = Literal["open", "closed", "none"]
"""Whether a prompt's last tokens open reasoning, close it, or do neither."""


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """How answers of a server are parsed under one set of template options."""

    kind: Literal["hermes", "process", "derender", "derender_whole"]
    reasoning: Reasoning
    """How answers mark reasoning. Used by the Hermes parser only."""
    tools: bool
    """True if the server parses tool calls."""
    special_without_tools: bool
    """True if special tokens appear in the server's chat answers to requests without tools."""
    special_with_tools: bool
    """True if special tokens appear in the server's chat answers to requests with tools."""
    tail: PromptTail
    """The end of the prompts with which this configuration was verified. Only the Hermes parser needs it, because it
    does not see the prompt itself."""
    parsers: Parsers = (None, None)
    """Names of the server's tool parser and reasoning parser. Used by the side process only."""

    def shows_special(self, request: ChatRequest) -> bool:
        return self.special_with_tools if uses_tools(request) else self.special_without_tools


class AnswerParser:
    """Parser of one answer (all choices of one call)."""

    constrained = False
    """True if the answer is sampled under a grammar (structured output) that the server's parser asks for."""

    async def open(self, body: Json) -> Json:
        """Prepare to parse, and return the body of the completion request with the fields that this parser needs."""
        return body

    async def parse(self, event: SampleEvent) -> SampleEvent:
        """Return the event with its raw text parsed."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the parser holds for this answer. May be called more than once."""


def make_answer_parser(
    client: VllmClient, request: ChatRequest, prompt: TokenIds, config: ParserConfig, process: ParserProcess | None
) -> AnswerParser:
    """Return the parser of one call's answer. Raises CannotContinueError if no parser fits the request."""
    if uses_tools(request) and not config.tools:
        raise CannotContinueError("the server parses no tool calls. Start vLLM with --enable-auto-tool-choice.")
    if has_strict_tool(request) and config.kind != "process":
        raise CannotContinueError(
            "a tool is strict, so the server's chat route samples under a grammar. Polar can get this grammar only "
            "from vLLM's parsers: install vLLM on this machine and name its Python by the setting engine.vllm_python."
        )
    if config.kind == "hermes":
        return HermesAnswerParser(request, config)
    if config.kind == "process":
        assert process is not None
        return ProcessAnswerParser(process, config.parsers, parser_request(client.model, request), prompt)
    if request.sampling.stop:
        raise CannotContinueError(
            "the request has stop strings, and the answer is parsed by the server's route /derender. The route reads "
            "whole tokens, so the text might go on after a stop string."
        )
    return DerenderAnswerParser(client, request, prompt, config)


def has_strict_tool(request: ChatRequest) -> bool:
    """Return whether the model may call tools, and one of them is strict (its arguments must fit its schema)."""
    return uses_tools(request) and any(tool.get("function", {}).get("strict") is True for tool in request.tools)


def parser_request(model: str, request: ChatRequest) -> Json:
    """Return a short chat request for which vLLM parses an answer in the same way as for `request`.

    Of the conversation only the number of tool calls matters, because some parsers number the calls of a conversation.
    """
    earlier = sum(len(message.tool_calls) for message in request.messages)
    messages = [Message("user", "")]
    if earlier:
        messages.append(Message("assistant", "", tool_calls=(ToolCall("polarcal1", "look", "{}"),) * earlier))
    plain = replace(request, messages=tuple(messages), sampling=Sampling(stop=request.sampling.stop))
    return {"model": model, **chat_body(plain, stream=True)}


class HermesAnswerParser(AnswerParser):
    def __init__(self, request: ChatRequest, config: ParserConfig) -> None:
        self._tools = uses_tools(request)
        self._special = config.shows_special(request)
        self._reasoning = config.reasoning
        self._parsers: dict[int, HermesParser] = {}

    async def open(self, body: Json) -> Json:
        return {**body, "skip_special_tokens": not self._special}

    async def parse(self, event: SampleEvent) -> SampleEvent:
        parser = self._parsers.get(event.index)
        if parser is None:
            parser = self._parsers[event.index] = HermesParser(tools=self._tools, reasoning=self._reasoning)
        return parser.parse(event)


class ProcessAnswerParser(AnswerParser):
    def __init__(self, process: ParserProcess, parsers: Parsers, request: Json, prompt: TokenIds) -> None:
        self._process = process
        self._parsers = parsers
        self._request = request
        self._prompt = prompt
        self._stream: ParsedStream | None = None

    async def open(self, body: Json) -> Json:
        """Implement `AnswerParser.open`: also add the grammar by which vLLM's chat route would constrain the answer."""
        self._stream = await self._process.open(self._parsers, self._request, self._prompt.tolist())
        sampling = self._stream.sampling
        body = {**body, "skip_special_tokens": not sampling["special"]}
        if sampling["constraint"] is not None:
            self.constrained = True
            body["structured_outputs"] = sampling["constraint"]
        return body

    async def parse(self, event: SampleEvent) -> SampleEvent:
        assert self._stream is not None
        parsed = await self._stream.feed(event.index, event.token_ids, event.finish_reason)
        return replace(
            event,
            text=parsed["text"],
            reasoning=parsed["reasoning"],
            tool_calls=tuple(
                ToolDelta(call["index"], call["id"], call["name"], call["arguments"]) for call in parsed["calls"]
            ),
            finish_reason=parsed["finish"],
        )

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@dataclass(slots=True)
class _DerenderState:
    """Progress of one choice: its unparsed token ids, its number of tokens, and the server's own parser state."""

    pending: list[int]
    count: int = 0
    server_state: Json | None = None


class DerenderAnswerParser(AnswerParser):
    def __init__(self, client: VllmClient, request: ChatRequest, prompt: TokenIds, config: ParserConfig) -> None:
        self._client = client
        self._whole = config.kind == "derender_whole"
        self._special = config.shows_special(request)
        self._prompt = prompt
        self._request = parser_request(client.model, request)
        self._choices: dict[int, _DerenderState] = {}

    async def open(self, body: Json) -> Json:
        return {**body, "skip_special_tokens": not self._special}

    async def parse(self, event: SampleEvent) -> SampleEvent:
        choice = self._choices.setdefault(event.index, _DerenderState([]))
        choice.pending += event.token_ids
        choice.count += len(event.token_ids)
        finish = event.finish_reason
        waits = self._whole or len(choice.pending) < max(_DERENDER_INTERVAL, choice.count // _DERENDER_INTERVAL)
        if finish is None and waits:
            return replace(event, text="")
        if finish == "stop":
            del choice.pending[-1:]  # the end-of-turn token has no text
        is_whole = finish is not None and choice.server_state is None
        delta, finish = await (
            self._derender_whole(choice, finish) if is_whole else self._derender(choice, event.index, finish)
        )
        choice.pending = []
        calls = tuple(tool_delta(call, place) for place, call in enumerate(delta.get("tool_calls") or ()))
        return replace(
            event,
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
            tool_calls=calls,
            finish_reason=finish if event.finish_reason is not None else None,
        )

    async def _derender_whole(self, choice: _DerenderState, finish: str | None) -> tuple[Json, str | None]:
        """Return the message of a whole answer, and its finish reason."""
        if not choice.pending:
            return {}, finish
        sampled = {"index": 0, "token_ids": choice.pending, "finish_reason": finish}
        prompt = self._prompt.tolist()
        generated = {"request_id": "polar", "choices": [sampled], "prompt_token_ids": prompt}
        body = {"stream": False, "generate_response": generated, "prompt_token_ids": prompt}
        answer = await self._client.json("POST", DERENDER, {**body, "chat_request": {**self._request, "stream": False}})
        try:
            message: Json = answer["choices"][0]["message"]
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"{self._client.name} parsed an answer into an unknown format: {error!r}.") from error
        return message, "tool_calls" if finish == "stop" and message.get("tool_calls") else finish

    async def _derender(self, choice: _DerenderState, index: int, finish: str | None) -> tuple[Json, str | None]:
        """Return the part of the message that the pending tokens add, and the finish reason."""
        chunk = {"index": index, "token_ids": choice.pending, "finish_reason": finish}
        body = {
            "stream": True,
            "prompt_token_ids": self._prompt.tolist(),
            "chat_request": self._request,
            "generate_chunk": {"request_id": "polar", "choices": [chunk]},
            "stream_state": choice.server_state,
        }
        answer = await self._client.json("POST", DERENDER, body)
        try:
            choice.server_state = answer["stream_state"]
            choices: list[Json] = answer["chunk"]["choices"]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self._client.name} parsed an answer into an unknown format: {error!r}.") from error
        if not choices:
            return {}, finish
        return choices[0].get("delta") or {}, choices[0].get("finish_reason")
