"""Does Polar read an answer as the server's own chat route reads it? Found out by making the server give answers.

The server is made to sample given texts (plain, a call, two calls, awkward JSON, reasoning, ...), and what its chat
route says of each is compared with what Polar's parser says of the same ids. Only a parser that agreed on all of them
is used to continue conversations from exact ids; white space around text and reasoning does not count.

How a text is forced:

* `structured_outputs: {"choice": [text]}`. vLLM lets reasoning run free before such a grammar, where it has a reasoning
  parser; a bias for the `</think>` token ends it at once.
* Reasoning itself by a ladder: biases for `<think>`, a letter and `</think>`, each lower than the one before, under a
  repetition penalty that takes every token out of the race once it was sampled.

What was really sampled is read from the ids: a text that was not sampled proves nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK, HermesParser, Reasoning
from polar_proxy.engines.openai_client import OpenAIClient, SseDecoder
from polar_proxy.engines.openai_stream import ChunkDecoder
from polar_proxy.engines.vllm.answer_parser import (
    DERENDER,
    DerenderAnswerParser,
    ParserConfig,
    PromptTail,
    cannot_continue,
)
from polar_proxy.engines.vllm.probe_forms import (
    CALL_FORMS,
    FORMS,
    IN_REASONING,
    LETTER,
    OTHER,
    PLAIN,
    TAGGED,
    ForcedAnswer,
    ParsedAnswer,
    matching_reasoning_mode,
    not_forced,
)
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Json, SampleEvent, Sampling, TokenIds

USER: list[Json] = [{"role": "user", "content": "Count to three."}]
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_TAIL_TOKENS = 16
_KEPT_READINGS = 32
_HINT = "Start vLLM with --enable-scale-out, so that its own parser can be asked."


class ParserProof:
    """Proofs for one server; each set of template options needs its own, as they decide whether the model reasons."""

    def __init__(self, http: OpenAIClient, model: str, *, end: int, tools: bool) -> None:
        """`end`: the end-of-turn token. `tools`: the server takes `tool_choice: auto`."""
        self._http = http
        self._model = model
        self._end = end
        self._tools = tools
        self._who = f"The engine at {http.url}"
        self._tags: dict[str, tuple[int, ...]] = {}

    async def prove(self, options: Mapping[str, Any]) -> ParserConfig:
        """How this server's answers are read under these template options. Raises RequestError (`cannot_continue`)."""
        try:
            return await self._prove({"chat_template_kwargs": dict(options)} if options else {})
        except RequestError as error:
            if error.code == "cannot_continue":
                raise
            raise cannot_continue(f"the server refused what it was asked to find that out: {error}") from error
        except EngineError as error:
            raise cannot_continue(f"finding out whether it can failed: {error}") from error

    async def _prove(self, options: Json) -> ParserConfig:
        if not self._tags:
            texts = (THINK, END_THINK, CALL, END_CALL, LETTER)
            self._tags = dict(zip(texts, await asyncio.gather(*map(self._encode, texts)), strict=True))
        frame = options | ({"tools": [TOOL]} if self._tools else {})
        opened, bare = await asyncio.gather(self._render(USER, True, frame), self._render(USER, False, frame))
        if opened[: len(bare)] != bare:
            raise cannot_continue("its template does not open an answer behind the rest of the prompt.")
        settings = [options, frame] if self._tools else [options]
        own, reasons, shown = await asyncio.gather(
            self._own_form(bare, frame),
            self._begins_in_reasoning(frame),
            asyncio.gather(*map(self._shows_special, settings)),
        )
        plain, tooled = shown[0], shown[-1]
        seen, tags_show = await self._read_back(await self._forced(frame, reasons), opened)
        # A parser needs to see the tags; apart from that, what a chat hides is hidden.
        plain, tooled = plain or not tags_show, tooled or not tags_show
        tail = self.tail(opened)
        # A `<think>` that the prompt holds is kept from being sampled again; answers have none of their own then.
        optional = {IN_REASONING, *([TAGGED] if reasons and tail != "none" else [])}
        problem = not_forced(seen, optional) or own
        mode: Reasoning | None = None
        if problem is None:
            mode, problem = matching_reasoning_mode(seen, tools=self._tools)
        if mode is not None:
            return ParserConfig("hermes", mode, self._tools, plain, tooled, tail)
        if (other := await self._derender_problem(seen, frame, opened)) is not None:
            raise cannot_continue(f"{problem} {other} {_HINT}")
        return ParserConfig("derender", "off", self._tools, plain, tooled, tail)

    # Asking

    async def _encode(self, text: str) -> tuple[int, ...]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return tuple((await self._http.json("POST", "/tokenize", body))["tokens"])

    async def _decode(self, ids: Sequence[int]) -> str:
        answer = await self._http.json("POST", "/detokenize", {"model": self._model, "tokens": list(ids)})
        return str(answer["prompt"])

    async def _render(self, messages: list[Json], generation: bool, frame: Json) -> list[int]:
        body = {"model": self._model, "messages": messages, "add_generation_prompt": generation, **frame}
        return list((await self._http.json("POST", "/tokenize", body))["tokens"])

    async def _sampled(self, path: str, body: Json) -> list[SampleEvent]:
        parser, decoder = ChunkDecoder(Sampling(), self._who), SseDecoder(self._http.url)
        events: list[SampleEvent] = []
        body = {"model": self._model, "temperature": 0, "return_token_ids": True, "stream": True, **body}
        response = await self._http.post(path, body)
        try:
            while not decoder.done and (data := await self._http.read_some(response)):
                events += parser.feed(decoder.feed(data))
            events += parser.end()
            await self._http.finish(response)
        finally:
            response.close()
        return events

    async def _chat(self, name: str, wanted: str, body: Json) -> ForcedAnswer:
        events = await self._sampled("/v1/chat/completions", {"messages": USER, "max_tokens": 200, **body})
        said = ParsedAnswer.of(events)
        ids = [token for event in events for token in event.token_ids]
        if said.finish != "length" and ids and ids[-1] == self._end:
            ids.pop()
        return ForcedAnswer(name, wanted, tuple(ids), said)

    def _bias(self, **rungs: float) -> Json:
        """Biases for the single tokens among tags and letter; text that is several tokens cannot be steered so."""
        texts = {"think": THINK, "letter": LETTER, "thought": END_THINK, "call": CALL, "called": END_CALL}
        tokens = {self._tags[texts[name]]: bias for name, bias in rungs.items()}
        return {"logit_bias": {str(ids[0]): bias for ids, bias in tokens.items() if len(ids) == 1}}

    async def _begins_in_reasoning(self, frame: Json) -> bool:
        seen = await self._chat("", "", frame | self._bias(letter=100) | {"max_tokens": 2})
        return bool(seen.said.reasoning) and not seen.said.text

    async def _shows_special(self, frame: Json) -> bool:
        """Whether chats with these settings show a special token that is sampled in the midst of an answer."""
        body = {"logit_bias": {str(self._end): 100}, "max_tokens": 2, "ignore_eos": True}
        seen = await self._chat("", "", frame | body)
        return bool(seen.said.text or seen.said.reasoning)

    async def _forced(self, frame: Json, reasons: bool) -> list[ForcedAnswer]:
        """The answers to compare, all asked at once."""
        frame = frame | {"repetition_penalty": 1.0}

        async def chosen(name: str, text: str, bias: Json, said: str = "") -> ForcedAnswer | None:
            # Text in front of the grammar's is sampled by the biases; a penalty makes a ladder of them.
            ladder = {"repetition_penalty": 4.0, "max_tokens": 60} if said else {}
            body = frame | bias | ladder | {"structured_outputs": {"choice": [text]}}
            try:
                return await self._chat(name, said + text, body)
            except EngineError:
                if name != IN_REASONING:
                    raise
                return None  # a model that takes other tokens there breaks vLLM's grammar, and ends its own request

        plain = self._bias(think=50, thought=100, call=100, called=100)
        forms = FORMS | (CALL_FORMS if self._tools else {})
        asked = [chosen(name, text, plain) for name, text in forms.items()]
        thought = f"{THINK}{LETTER}{END_THINK}"
        if reasons:
            asked.append(chosen("reasoning", PLAIN, self._bias(letter=100, thought=50), f"{LETTER}{END_THINK}"))
            asked.append(chosen(TAGGED, PLAIN, self._bias(think=100, letter=75, thought=50), thought))
            if self._tools:
                # Where a call ends reasoning, its tag is the first token that the grammar sees.
                asked.append(chosen(IN_REASONING, OTHER, self._bias(letter=70, call=100), LETTER))
        else:
            asked.append(chosen(TAGGED, f"{thought}{PLAIN}", plain))
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _read_back(self, seen: list[ForcedAnswer], opened: list[int]) -> tuple[list[ForcedAnswer], bool]:
        """The answers with their texts, all decoded in one request, between end-of-turn tokens; and whether
        completions show the tags by themselves (some models have them as special tokens).

        Completions have to show the same text of such ids: one is compared with its decoding.
        """
        rungs = self._bias(call=100, thought=75, think=50)
        body = {"prompt": opened, "max_tokens": 3, "repetition_penalty": 4.0, **rungs}
        shown, plain = await asyncio.gather(
            self._sampled("/v1/completions", body | {"skip_special_tokens": False}),
            self._sampled("/v1/completions", body),
        )
        rows = [_ids(shown, self._end), _ids(plain, self._end), *(answer.ids for answer in seen)]
        joined = [token for row in rows for token in (self._end, *row)]
        mark = await self._decode([self._end])
        before, *texts = (await self._decode(joined)).split(mark)
        if before or len(texts) != len(rows):
            raise cannot_continue("its end-of-turn token does not stand out in decoded text.")
        if texts[0] != "".join(event.text for event in shown):
            raise cannot_continue("its completions do not show the text of their tokens.")
        read = [replace(answer, text=text) for answer, text in zip(seen, texts[2:], strict=True)]
        return read, texts[1] == "".join(event.text for event in plain)

    async def _own_form(self, bare: list[int], frame: Json) -> str | None:
        """What is wrong with the template's own form of calls, which is the model's; None where it is Hermes'. `bare`:
        the rendering up to the turn that calls."""
        if not self._tools:
            return None
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = await self._render([*USER, turn], False, frame)
        parsed = HermesParser(tools=True).feed(await self._decode(whole[len(bare) :]))
        found = [(call.name, _json(call.arguments)) for call in parsed.tool_calls]
        if found == [("look", {"path": "a"})]:
            return None
        return "The template writes tool calls in another form than Hermes'."

    def tail(self, prompt: Sequence[int] | TokenIds) -> PromptTail:
        """Whether the tokens behind a prompt's last turn open reasoning or close it."""
        near = tuple(int(token) for token in prompt[-_TAIL_TOKENS:])
        near = near[_last(near, (self._end,)) + 1 :]
        places = {tag: _last(near, self._tags[tag]) for tag in (THINK, END_THINK)}
        if max(places.values()) < 0:
            return "none"
        return "open" if places[THINK] > places[END_THINK] else "closed"

    # Comparing

    async def _derender_problem(self, seen: list[ForcedAnswer], frame: Json, opened: list[int]) -> str | None:
        """What is wrong with the server's derendering of the same answers; None where nothing is."""
        request = ChatRequest(
            "", (), tools=tuple(frame.get("tools", ())), template_kwargs=frame.get("chat_template_kwargs", {})
        )
        prompt = np.array(opened, dtype=np.int32)

        async def said(answer: ForcedAnswer) -> ParsedAnswer:
            reader = DerenderAnswerParser(self._http, self._model, request, prompt)
            finish = "length" if answer.said.finish == "length" else "stop"
            last = answer.ids if finish == "length" else (*answer.ids, self._end)
            half = len(last) // 2
            pieces = [SampleEvent(token_ids=last[:half]), SampleEvent(token_ids=last[half:], finish_reason=finish)]
            return ParsedAnswer.of([await reader.read(piece) for piece in pieces])

        try:
            first = await said(seen[0])
        except (RequestError, EngineError):
            return f"The server does not offer {DERENDER}."
        others = await asyncio.gather(*map(said, seen[1:]))
        for answer, derendered in zip(seen, [first, *others], strict=True):
            if derendered != answer.said:
                return f"And {DERENDER} reads {answer.name} otherwise than its chat route."
        return None


class ProvenParsers:
    """How answers are read, by template options; each set of options is proved when it is first met."""

    def __init__(self, proof: ParserProof, first: ParserConfig) -> None:
        self._proof = proof
        self._known: dict[bytes, ParserConfig | RequestError] = {_key({}): first}
        self._lock = asyncio.Lock()

    async def of(self, options: Mapping[str, Any]) -> ParserConfig:
        """Raises RequestError (`cannot_continue`) where it was not proved."""
        key = _key(options)
        if key not in self._known:
            async with self._lock:
                if key not in self._known:
                    if len(self._known) >= _KEPT_READINGS:
                        raise cannot_continue("too many different sets of template options are in use.")
                    try:
                        self._known[key] = await self._proof.prove(options)
                    except RequestError as error:
                        self._known[key] = error
        found = self._known[key]
        if isinstance(found, RequestError):
            raise cannot_continue(str(found))
        return found

    def check(self, prompt: TokenIds, reading: ParserConfig) -> None:
        """Raises RequestError where a prompt ends otherwise than the ones with which the reading was proved."""
        if (tail := self._proof.tail(prompt)) != reading.tail:
            raise cannot_continue(f"the prompt leaves reasoning {tail}, its template leaves it {reading.tail}.")


def _ids(events: Sequence[SampleEvent], end: int) -> tuple[int, ...]:
    """What was sampled, without end-of-turn tokens."""
    return tuple(token for event in events for token in event.token_ids if token != end)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _key(options: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS)


def _last(row: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Where `wanted` stands last in `row`; -1: nowhere."""
    size = len(wanted)
    return next((at for at in range(len(row) - size, -1, -1) if size and row[at : at + size] == wanted), -1)
