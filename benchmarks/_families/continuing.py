"""Run conversations through Polar's PromptBuilder over one chat template, and compare each prompt with an oracle.

The oracle knows nothing of how the builder works. Every text of a conversation ends in a word that occurs once. The
"sampled" answer is the text that the template writes for the answer, up to the first stop token, split into other
tokens than the tokenizer would choose. A continued prompt is right if

* it is the previous prompt and answer, followed by the tokens of what the template writes after that answer, and
* up to the last answer it has the same text before the first of these words, and the same words in the same order and
  number, as the template's rendering of the whole conversation. Words of answers are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from benchmarks._families.template_engine import TemplateEngine, with_single_calls
from polar_proxy.config import GatewaySettings
from polar_proxy.errors import RequestError
from polar_proxy.offload import OffloadThread
from polar_proxy.sequences import first_difference
from polar_proxy.sessions.continuation import PromptBuilder, prompt_config
from polar_proxy.sessions.lineage import Base
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import CallRecord, ChatRequest, Choice, Message, ToolCall

Result = Literal["right", "wrong", "refused", "template refuses"]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_WORD = re.compile(r"word[a-z]+[0-9]+x")


@dataclass(frozen=True, slots=True)
class TurnResult:
    result: Result
    reason: str = ""


@dataclass(slots=True)
class FamilyResult:
    """How many turns of the conversations over one template were continued, and whether rightly."""

    name: str
    conversation: str = "none"
    """The richest kind of conversation that the template renders: with parallel calls, with single calls, or text."""
    turns: list[TurnResult] = field(default_factory=list)
    cases: dict[str, list[TurnResult]] = field(default_factory=dict)

    @property
    def grade(self) -> str:
        everything = [turn for turns in (self.turns, *self.cases.values()) for turn in turns]
        if any(turn.result == "wrong" for turn in everything):
            return "wrong"
        right = sum(turn.result == "right" for turn in self.turns)
        if not self.turns or not right:
            return "none"
        return "all" if right == len(self.turns) else "some"

    def __str__(self) -> str:
        return f"{self.name}: {self.turns} {self.cases}"


def user(number: int, text: str = "") -> Message:
    return Message("user", f"{text}Please do worduser{number}x")


def calls(number: int, count: int = 1, arguments: str | None = None) -> Message:
    made = (
        ToolCall(
            f"call{number:04}{index}",
            "look",
            arguments if arguments is not None else f'{{"path": "wordcall{number}{index}x"}}',
        )
        for index in range(count)
    )
    return Message("assistant", "", tool_calls=tuple(made))


def results(answer: Message, number: int) -> list[Message]:
    return [
        Message("tool", f"found wordtool{number}{index}x", tool_call_id=call.id, name=call.name)
        for index, call in enumerate(answer.tool_calls)
    ]


def text(number: int) -> Message:
    return Message("assistant", f"It is wordtext{number}x")


SYSTEM = Message("system", "Be brief. wordsystem0x")


def full_conversation(opening: Sequence[Message] = (SYSTEM,), *, first_arguments: str | None = None) -> list[Message]:
    """Return a conversation with seven answers: to two user messages, a tool result, two results, a result, a user
    message, and a result."""
    one, two, three, four = calls(2, arguments=first_arguments), calls(3, 2), calls(4), calls(6)
    return [
        *opening,
        *(user(1), text(1)),
        *(user(2), one, *results(one, 2), two, *results(two, 3), three, *results(three, 4), text(5)),
        *(user(6), four, *results(four, 6), text(7)),
    ]


def text_conversation(opening: Sequence[Message] = (SYSTEM,)) -> list[Message]:
    turns = [message for number in range(1, 6) for message in (user(number), text(number))]
    return [*opening, *turns]


class FamilyRun:
    """All conversations over one template, through one PromptBuilder, as one gateway would see them."""

    def __init__(self, engine: TemplateEngine, read: Callable[[str], Awaitable[CallRecord | None]]) -> None:
        self._engine = engine
        self._builder = PromptBuilder(engine, read, GatewaySettings(), OffloadThread("prompts"))
        self._number = 0
        self._tools: tuple[dict[str, object], ...] = (TOOL,)

    async def run(self) -> FamilyResult:
        out = FamilyResult(self._engine.family.name)
        named = self._choose()
        if named is None:
            return out
        out.conversation, messages = named
        out.turns = await self.continue_all(messages)
        for name, changed in self._cases(messages):
            out.cases[name] = await self.continue_all(changed)
        return out

    def _choose(self) -> tuple[str, list[Message]] | None:
        whole = full_conversation()
        forms = [
            ("parallel calls", whole, (TOOL,)),
            ("single calls", list(with_single_calls(whole)), (TOOL,)),
            ("text", text_conversation(), ()),
            ("text, no system", text_conversation(()), ()),
            ("text, tools", text_conversation(), (TOOL,)),
        ]
        for name, messages, tools in forms:
            self._tools = tools
            if self._accepts(messages):
                return name, messages
        return None

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            for end in answer_places(messages):
                rendered = self._engine.text(self._request(messages[:end]))
                asked = "".join(str(message.content) for message in messages[:end] if message.role != "assistant")
                if not set(_WORD.findall(asked)) <= set(_WORD.findall(rendered)):
                    return False
        except RequestError:
            return False
        return True

    def _cases(self, messages: list[Message]) -> list[tuple[str, list[Message]]]:
        """Return (name, conversation) pairs for the same gateway: variants with one property that some templates treat
        specially, and the unchanged conversation again."""
        start = next(place for place, message in enumerate(messages) if message.role == "user")
        system, rest = messages[:start], messages[start:]
        second = answer_places(messages)[1] - 1
        said = messages[second]

        def later(role: str) -> list[Message]:
            return [*messages[:second], Message(role, f"Mind word{role}9x"), said, *messages[second + 1 :]]

        flagged = [replace(message, content=f"{message.content} /no_think") for message in system]
        flagged_user = [replace(rest[0], content=f"/no_think {rest[0].content}"), *rest[1:]]
        late_flag = [
            replace(message, content=f"{message.content} /no_think")
            if message.role == "user" and place > 2
            else message
            for place, message in enumerate(rest)
        ]
        out = [
            ("later system", later("system")),
            ("later developer", later("developer")),
            ("flag in system", [*flagged, *rest]),
            ("flag in user", [*system, *flagged_user]),
            ("flag later", [*system, *late_flag]),
            ("plain again", messages),
        ]
        if any(message.tool_calls for message in messages):
            empty = [
                replace(message, tool_calls=tuple(replace(call, arguments="{}") for call in message.tool_calls))
                for message in messages
            ]
            out.append(("empty arguments", empty))
        reasoned = [
            replace(message, reasoning=f"Perhaps wordthink{place}x") if message.role == "assistant" else message
            for place, message in enumerate(messages)
        ]
        out.append(("reasoning", reasoned))
        out.append(("white space", [_spaced(message) for message in reasoned]))
        return out

    def _request(self, messages: Sequence[Message]) -> ChatRequest:
        return ChatRequest("m", tuple(messages), tools=tuple(self._tools))

    async def continue_all(self, messages: Sequence[Message]) -> list[TurnResult]:
        """Run one session: the engine renders the first prompt; Polar continues each later one if it can."""
        self._number += 1
        session = SessionState(f"session{self._number}", {})
        places = answer_places(messages)
        try:
            prompt = await self._engine.render(self._request(messages[: places[0]]))
        except RequestError:
            return [TurnResult("template refuses")]
        out: list[TurnResult] = []
        for number, (place, following) in enumerate(pairwise(places)):
            request = self._request(messages[:following])
            try:
                rendered = self._engine.text(request)
            except RequestError:
                out.append(TurnResult("template refuses"))
                break
            answer, suffix = self._sampled(messages[:place], messages[place], request, rendered)
            call_id = f"call{self._number}-{number}"
            config = prompt_config(self._request(messages[:place]))
            ids = np.array(prompt, dtype=np.int32)
            choice = Choice(0, messages[place], "stop", np.array(answer, dtype=np.int32), np.zeros(len(answer)))
            session.remember_answer(call_id, ids, choice, (), config, ())
            plan = await self._builder.build(request, Base(call_id, 0, place + 1), session)
            if plan.prompt is None:
                out.append(TurnResult("refused", str(plan.reason)))
                prompt = self._engine.encode_text(rendered)
                continue
            given = plan.prompt.token_ids.tolist()
            problem = await self._problem([*prompt, *answer], suffix, given, rendered)
            out.append(TurnResult("wrong", problem) if problem else TurnResult("right"))
            prompt = given
        return out

    def _sampled(
        self, before: Sequence[Message], answer: Message, request: ChatRequest, rendered: str
    ) -> tuple[list[int], list[int]]:
        """Return the token ids that a model samples for this answer, and those that the template writes after it."""
        encode = self._engine.encode_text
        start = self._opened(before, rendered)
        end, following = self._extent(answer, request, rendered)
        start = min(start, end)
        stop = next((s for s in self._engine.family.stops if rendered.startswith(s, end)), "")
        sampled = [
            token for char in _split(rendered[start:end], self._engine.family.control_tokens) for token in encode(char)
        ]
        written = encode((stop or self._engine.family.stops[0]) + rendered[following:])
        return [*sampled, written[0]], written[1:]

    def _extent(self, answer: Message, request: ChatRequest, rendered: str) -> tuple[int, int]:
        """Return two positions in `rendered`: the end of the answer's text, and the end of its stop token."""
        tokens = [re.escape(stop) for stop in self._engine.family.stops]
        earlier = request.messages[: len(request.messages) - _new_count(request.messages)]
        own = _WORD.findall(str(answer.content) + "".join(call.arguments for call in answer.tool_calls))
        known = [rendered.rindex(word) + len(word) for word in own if word in rendered]
        new = request.messages[len(earlier) :]
        words = [word for message in new for word in _WORD.findall(str(message.content)) if word in rendered]
        limit = min((rendered.rindex(word) for word in words), default=len(rendered))
        start = max(known) if known else self._opened(earlier[:-1], rendered)
        for call in () if known else answer.tool_calls:
            start = max(start, rendered.find(call.name, start, limit) + len(call.name))
        written = self._engine.family.written
        if not answer.tool_calls and written:
            tokens = [re.escape(written)]
        found = re.compile("|".join(tokens)).search(rendered, start, limit)
        return (found.start(), found.end()) if found else (start, start)

    def _opened(self, before: Sequence[Message], rendered: str) -> int:
        """Return the position in `rendered` at which the answer to `before` begins: after the last word of `before`,
        and after the text with which the template opens an answer."""
        opened = self._engine.text(self._request(before))
        words = [word for word in _WORD.findall(opened) if word in rendered]
        if not words:
            return first_difference(opened, rendered)
        last = max(words, key=lambda word: rendered.rindex(word))
        place = rendered.rindex(last) + len(last)
        tail = opened[opened.rindex(last) + len(last) :]
        found = place + first_difference(tail, rendered[place:])
        for token in self._engine.family.control_tokens:  # a token is not cut
            for start in range(max(place, found - len(token) + 1), found):
                if rendered.startswith(token, start):
                    return start
        return found

    async def _problem(self, before: list[int], suffix: list[int], given: list[int], rendered: str) -> str | None:
        if given[: len(before)] != before:
            return "the tokens of the turn before were changed"
        if given[len(before) :] != suffix:
            got = await self._engine.decode(given[len(before) :])
            return f"suffix {got[:60]!r} instead of {(await self._engine.decode(suffix))[:60]!r}"
        shown = await self._engine.decode(given)
        if _asked(shown) != _asked(rendered):
            return "messages are missing or moved"
        first = _asked(rendered)[0] if _asked(rendered) else ""
        if shown[: shown.find(first)] != rendered[: rendered.find(first)]:
            return "another beginning"
        return None


def _spaced(message: Message) -> Message:
    """Return a message with white space around its texts, as models write it; many templates trim it."""
    reasoning = f"\n{message.reasoning}\n" if message.reasoning else None
    return replace(message, content=f"\n\n{message.content} \n", reasoning=reasoning)


def answer_places(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


def _new_count(messages: Sequence[Message]) -> int:
    return next(n for n, message in enumerate(reversed(messages)) if message.role == "assistant")


def _asked(shown: str) -> list[str]:
    """Return the words of a rendered text that come from messages other than answers."""
    return [word for word in _WORD.findall(shown) if not word.startswith(("wordtext", "wordcall", "wordthink"))]


def _split(shown: str, control_tokens: Sequence[str]) -> list[str]:
    """Split a text into control tokens and, everywhere else, single characters."""
    tokens = "|".join(re.escape(token) for token in sorted(control_tokens, key=len, reverse=True))
    return [part for part in re.findall(f"{tokens}|.", shown, flags=re.DOTALL) if part]
