"""Prove that Polar parses answers as the server's own chat route does: make the server sample given texts, and compare.

The texts are plain text, a tool call, two tool calls, awkward JSON, reasoning, ... The chat route's result for each is
compared with a parser's result for the same ids. Only a parser that agreed on all of them is used to continue
conversations from exact ids. White space around text and reasoning is not compared.

How a text is forced:

* Text and tool calls by `structured_outputs: {"choice": [text]}`. With a reasoning parser, vLLM applies this grammar
  only after the reasoning; a bias for the `</think>` token ends the reasoning at once.
* Reasoning by descending biases for `<think>`, a letter and `</think>`. A repetition penalty excludes each token once
  it was sampled, so that each comes once and in this order.

The ids show whether a text was really sampled. A text that was not sampled proves nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import orjson

from polar_proxy.engines.base import CannotContinueError
from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK, HermesParser, Reasoning
from polar_proxy.engines.vllm.answer_parser import DerenderAnswerParser, ParserConfig, PromptTail
from polar_proxy.engines.vllm.client import CHAT, COMPLETIONS, DERENDER, VllmClient, unless_refused
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Json, SampleEvent, TokenIds

USER: list[Json] = [{"role": "user", "content": "Count to three."}]
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
LETTER = "Z"
PLAIN = "Hello there."
ONE_CALL = CALL + '\n{"name": "look", "arguments": {"path": "a"}}\n' + END_CALL
EMPTY_CALL = CALL + '\n{"name": "look", "arguments": {}}\n' + END_CALL
AWKWARD_CALL = CALL + '\n{"name": "look", "arguments": {"b" : true,"p":"a\\u00e9 é", "e":[ ]}}\n' + END_CALL
TEXTS = {"plain text": PLAIN}
CALL_TEXTS = {
    "text and a call": f"I look.\n{ONE_CALL}",
    "two calls": f"{EMPTY_CALL}\n{EMPTY_CALL}",
    "awkward JSON": AWKWARD_CALL,
}
TAGGED, IN_REASONING = "tagged reasoning", "a call in reasoning"
_TAIL_TOKENS = 16
_KEPT_CONFIGS = 32
_REMEDY = "Start vLLM with --enable-scale-out, so that its own parser can be called."


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The content of a parsed answer, without the white space around it. Tool calls are (name, arguments)."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish: str | None

    @classmethod
    def of(cls, events: Sequence[SampleEvent]) -> ParsedAnswer:
        calls: dict[int, tuple[str, str]] = {}
        for delta in (delta for event in events for delta in event.tool_calls):
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name + (delta.name or ""), arguments + delta.arguments)
        return cls(
            "".join(event.text for event in events).strip(),
            "".join(event.reasoning for event in events).strip(),
            tuple(calls[index] for index in sorted(calls)),
            next((event.finish_reason for event in reversed(events) if event.finish_reason), None),
        )


@dataclass(frozen=True, slots=True)
class ForcedAnswer:
    """One answer of the server: ids without the end-of-turn token, their text, and how the chat route parsed it."""

    name: str
    wanted: str
    ids: tuple[int, ...]
    parsed: ParsedAnswer
    text: str = ""


class ParserProofs:
    """Parser configurations of one server. Each set of template options needs its own proof, because the options decide
    whether the model reasons. The proof is made at the first use of the set."""

    def __init__(self, client: VllmClient, *, end: int, tools: bool) -> None:
        """`end` is the end-of-turn token; `tools` says that the server accepts `tool_choice: auto`."""
        self._client = client
        self._end = end
        self._tools = tools
        self._tags: dict[str, tuple[int, ...]] = {}
        self._proved: dict[bytes, ParserConfig | CannotContinueError] = {}
        self._lock = asyncio.Lock()

    async def config_for(self, options: Mapping[str, Any], prompt: TokenIds) -> ParserConfig:
        """Return how an answer to `prompt` under these template options is parsed. Raises CannotContinueError."""
        config = await self.prove(options)
        if (tail := self.tail(prompt)) != config.tail:
            raise CannotContinueError(
                f"the prompt leaves reasoning {tail!r}, but the template leaves it {config.tail!r}."
            )
        return config

    async def prove(self, options: Mapping[str, Any]) -> ParserConfig:
        """Return how this server's answers are parsed under these template options. Raises CannotContinueError."""
        key = orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS)
        if key not in self._proved:
            async with self._lock:
                if key not in self._proved:
                    if len(self._proved) >= _KEPT_CONFIGS:
                        raise CannotContinueError("too many different sets of template options are in use.")
                    self._proved[key] = await self._try_to_prove(options)
        proved = self._proved[key]
        if isinstance(proved, CannotContinueError):
            raise CannotContinueError(proved.reason)
        return proved

    async def _try_to_prove(self, options: Mapping[str, Any]) -> ParserConfig | CannotContinueError:
        try:
            return await self._prove({"chat_template_kwargs": dict(options)} if options else {})
        except CannotContinueError as error:
            return error
        except RequestError as error:
            return CannotContinueError(f"the server refused a request of its verification: {error}")
        except EngineError as error:
            return CannotContinueError(f"its verification failed: {error}")

    async def _prove(self, options: Json) -> ParserConfig:
        if not self._tags:
            texts = (THINK, END_THINK, CALL, END_CALL, LETTER)
            ids = await asyncio.gather(*map(self._client.encode, texts))
            self._tags = dict(zip(texts, map(tuple, ids), strict=True))
        frame = options | ({"tools": [TOOL]} if self._tools else {})
        opened, bare = await asyncio.gather(self._render(USER, True, frame), self._render(USER, False, frame))
        if opened[: len(bare)] != bare:
            raise CannotContinueError("its template does not append what opens an answer to the prompt.")
        settings = [options, frame] if self._tools else [options]
        call_problem, reasons, shown = await asyncio.gather(
            self._call_form_problem(bare, frame),
            self._begins_in_reasoning(frame),
            asyncio.gather(*map(self._shows_special, settings)),
        )
        answers, tags_show = await self._read_back(await self._force_answers(frame, reasons), opened)
        # A parser needs to see the tags; apart from that, completions hide the same tokens as a chat.
        without_tools, with_tools = shown[0] or not tags_show, shown[-1] or not tags_show
        tail = self.tail(opened)
        # If the prompt has `<think>`, the penalty excludes another one, so that no answer begins with the tag.
        optional = {IN_REASONING, *([TAGGED] if reasons and tail != "none" else [])}
        problem = unforced(answers, optional) or call_problem
        mode: Reasoning | None = None
        if problem is None:
            mode, problem = matching_reasoning_mode(answers, tools=self._tools)
        if mode is not None:
            return ParserConfig("hermes", mode, self._tools, without_tools, with_tools, tail)
        if (other := await self._derender_problem(answers, frame, opened)) is not None:
            raise CannotContinueError(f"{problem} {other} {_REMEDY}")
        return ParserConfig("derender", "off", self._tools, without_tools, with_tools, tail)

    def tail(self, prompt: Sequence[int] | TokenIds) -> PromptTail:
        """Return whether the tokens after a prompt's last turn open reasoning or close it."""
        near = tuple(int(token) for token in prompt[-_TAIL_TOKENS:])
        near = near[_last(near, (self._end,)) + 1 :]
        places = {tag: _last(near, self._tags[tag]) for tag in (THINK, END_THINK)}
        if max(places.values()) < 0:
            return "none"
        return "open" if places[THINK] > places[END_THINK] else "closed"

    # Requests to the server

    async def _render(self, messages: list[Json], generation: bool, frame: Json) -> list[int]:
        return await self._client.tokenize({"messages": messages, "add_generation_prompt": generation, **frame})

    async def _sample(self, path: str, body: Json) -> list[SampleEvent]:
        return await self._client.sampled(path, {"temperature": 0, "return_token_ids": True, **body})

    async def _chat(self, name: str, wanted: str, body: Json) -> ForcedAnswer:
        events = await self._sample(CHAT, {"messages": USER, "max_tokens": 200, **body})
        parsed = ParsedAnswer.of(events)
        ids = [token for event in events for token in event.token_ids]
        if parsed.finish != "length" and ids and ids[-1] == self._end:
            ids.pop()
        return ForcedAnswer(name, wanted, tuple(ids), parsed)

    def _bias(self, **biases: float) -> Json:
        """Return logit biases for the tags and the letter. Those of more than one token are left out."""
        texts = {"think": THINK, "letter": LETTER, "thought": END_THINK, "call": CALL, "called": END_CALL}
        tokens = {self._tags[texts[name]]: bias for name, bias in biases.items()}
        return {"logit_bias": {str(ids[0]): bias for ids, bias in tokens.items() if len(ids) == 1}}

    async def _begins_in_reasoning(self, frame: Json) -> bool:
        answer = await self._chat("", "", frame | self._bias(letter=100) | {"max_tokens": 2})
        return bool(answer.parsed.reasoning) and not answer.parsed.text

    async def _shows_special(self, frame: Json) -> bool:
        """Return whether chats with these settings show a special token that is sampled in the middle of an answer."""
        body = {"logit_bias": {str(self._end): 100}, "max_tokens": 2, "ignore_eos": True}
        answer = await self._chat("", "", frame | body)
        return bool(answer.parsed.text or answer.parsed.reasoning)

    async def _force_answers(self, frame: Json, reasons: bool) -> list[ForcedAnswer]:
        frame = frame | {"repetition_penalty": 1.0}

        async def force(name: str, text: str, bias: Json, before: str = "") -> ForcedAnswer | None:
            # `before`, the text before the grammar's, is sampled by descending biases under a penalty.
            penalty = {"repetition_penalty": 4.0, "max_tokens": 60} if before else {}
            body = frame | bias | penalty | {"structured_outputs": {"choice": [text]}}
            try:
                return await self._chat(name, before + text, body)
            except EngineError:
                if name != IN_REASONING:
                    raise
                return None  # a model that samples other tokens there breaks vLLM's grammar, which ends the request

        plain = self._bias(think=50, thought=100, call=100, called=100)
        texts = TEXTS | (CALL_TEXTS if self._tools else {})
        requests = [force(name, text, plain) for name, text in texts.items()]
        thought = f"{THINK}{LETTER}{END_THINK}"
        if reasons:
            requests.append(force("reasoning", PLAIN, self._bias(letter=100, thought=50), f"{LETTER}{END_THINK}"))
            requests.append(force(TAGGED, PLAIN, self._bias(think=100, letter=75, thought=50), thought))
            if self._tools:
                # If a tool call ends the reasoning, its tag is the first token that the grammar sees.
                requests.append(force(IN_REASONING, EMPTY_CALL, self._bias(letter=70, call=100), LETTER))
        else:
            requests.append(force(TAGGED, f"{thought}{PLAIN}", plain))
        return [answer for answer in await asyncio.gather(*requests) if answer is not None]

    async def _read_back(self, answers: list[ForcedAnswer], opened: list[int]) -> tuple[list[ForcedAnswer], bool]:
        """Return the answers with their texts, and whether completions show the tags by default.

        (In some models the tags are special tokens.) All texts are decoded in one request, separated by end-of-turn
        tokens. Completions must show the same text for such ids: one completion is compared with its decoding.
        """
        biases = self._bias(call=100, thought=75, think=50)
        body = {"prompt": opened, "max_tokens": 3, "repetition_penalty": 4.0, **biases}
        shown, plain = await asyncio.gather(
            self._sample(COMPLETIONS, body | {"skip_special_tokens": False}),
            self._sample(COMPLETIONS, body),
        )
        rows = [_ids(shown, self._end), _ids(plain, self._end), *(answer.ids for answer in answers)]
        joined = [token for row in rows for token in (self._end, *row)]
        mark = await self._client.decode([self._end])
        before, *texts = (await self._client.decode(joined)).split(mark)
        if before or len(texts) != len(rows):
            raise CannotContinueError("its end-of-turn token cannot be recognised in decoded text.")
        if texts[0] != "".join(event.text for event in shown):
            raise CannotContinueError("its completions do not show the text of their tokens.")
        read = [replace(answer, text=text) for answer, text in zip(answers, texts[2:], strict=True)]
        return read, texts[1] == "".join(event.text for event in plain)

    async def _call_form_problem(self, bare: list[int], frame: Json) -> str | None:
        """Return a problem if the Hermes parser cannot read a tool call as the chat template writes it.

        The model writes it so too. None if it can, or if the server takes no tools. `bare`: the rendered tokens before
        the assistant turn with the tool call.
        """
        if not self._tools:
            return None
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = await self._render([*USER, turn], False, frame)
        written = await self._client.decode(whole[len(bare) :])
        parsed = HermesParser(tools=True).parse(SampleEvent(text=written))
        found = [(call.name, _parse_json(call.arguments)) for call in parsed.tool_calls]
        if found == [("look", {"path": "a"})]:
            return None
        return "The template writes tool calls in another form than Hermes'."

    async def _derender_problem(self, answers: list[ForcedAnswer], frame: Json, opened: list[int]) -> str | None:
        """Return how `DERENDER` parses these answers differently from the chat route; None if it does not."""
        request = ChatRequest(
            "", (), tools=tuple(frame.get("tools", ())), template_kwargs=frame.get("chat_template_kwargs", {})
        )
        prompt = np.array(opened, dtype=np.int32)

        async def derender(answer: ForcedAnswer) -> ParsedAnswer:
            parser = DerenderAnswerParser(self._client, request, prompt)
            finish = "length" if answer.parsed.finish == "length" else "stop"
            ids = answer.ids if finish == "length" else (*answer.ids, self._end)
            half = len(ids) // 2
            halves = [SampleEvent(token_ids=ids[:half]), SampleEvent(token_ids=ids[half:], finish_reason=finish)]
            return ParsedAnswer.of([await parser.parse(event) for event in halves])

        first = await unless_refused(derender(answers[0]))
        if first is None:
            return f"The server does not offer {DERENDER}."
        others = await asyncio.gather(*map(derender, answers[1:]))
        for answer, derendered in zip(answers, [first, *others], strict=True):
            if derendered != answer.parsed:
                return f"And {DERENDER} parses {answer.name} otherwise than its chat route."
        return None


def unforced(answers: Sequence[ForcedAnswer], optional: set[str]) -> str | None:
    """Return a message about the first text that was not sampled although forced; None if all were sampled."""
    missing = [answer.name for answer in answers if answer.wanted not in answer.text and answer.name not in optional]
    if not missing:
        return None
    return f"The server could not be made to answer with {missing[0]} (structured outputs or biases have no effect)."


def matching_reasoning_mode(answers: Sequence[ForcedAnswer], *, tools: bool) -> tuple[Reasoning | None, str | None]:
    """Return the first reasoning mode in which the Hermes parser agrees with the server on every answer.

    If there is none, return None and a description of the disagreement.
    """
    wrong: dict[Reasoning, list[ForcedAnswer]] = {}
    for mode in get_args(Reasoning):
        wrong[mode] = [answer for answer in answers if _parse_hermes(answer, mode, tools=tools) != answer.parsed]
        if not wrong[mode]:
            return mode, None
    nearest = min(wrong, key=lambda mode: len(wrong[mode]))
    return None, f"Its chat route parses {wrong[nearest][0].name} otherwise than the Hermes parser."


def _parse_hermes(answer: ForcedAnswer, mode: Reasoning, *, tools: bool) -> ParsedAnswer:
    finish = "length" if answer.parsed.finish == "length" else "stop"
    event = SampleEvent(text=answer.text, finish_reason=finish)
    return ParsedAnswer.of([HermesParser(tools=tools, reasoning=mode).parse(event)])


def _ids(events: Sequence[SampleEvent], end: int) -> tuple[int, ...]:
    """Return the sampled ids without end-of-turn tokens."""
    return tuple(token for event in events for token in event.token_ids if token != end)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _last(row: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Return the last position of `wanted` in `row`, or -1."""
    size = len(wanted)
    return next((at for at in range(len(row) - size, -1, -1) if size and row[at : at + size] == wanted), -1)
