"""Find the text after an answer in a rendered conversation, and compare the text before it with an earlier rendering.

Marks (words that occur nowhere else) are put around the texts of all messages. White space at the ends of a text stays
outside the marks, because many templates trim it. The template renders the marked messages too. If the marked rendering
without its marks is exactly the plain one, the marks show which part of the text belongs to which message:

    front | answer | stop token, new messages, opening of the next answer

The texts between the answers are *fixed*: the template wrote them, and a continued prompt must hold them as they are.
Answers are not compared, because the prompt has their sampled tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from polar_proxy.sequences import first_difference
from polar_proxy.sessions.hashing import turn_start
from polar_proxy.types import Message, ToolCall


class RenderingDifference(NamedTuple):
    """A kind of difference that is ignored when two renderings of the text before a past answer are compared."""

    name: str
    pattern: re.Pattern[str]
    """Finds the text that is left out of the comparison."""
    reason: str


IGNORED_DIFFERENCES = (
    RenderingDifference(
        "harmony_reasoning",
        re.compile(r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|><\|start\|>assistant|$)", re.DOTALL),
        "gpt-oss shows the analysis channel in the last turns only.",
    ),
    RenderingDifference(
        "reasoning",
        re.compile(
            r"<think(?:ing)?\b[^>]*>.*?</think(?:ing)?\b[^>]*>|</?think(?:ing)?\b[^>]*>"
            r"|\[THINK\].*?\[/THINK\]|\[/?THINK\]|</?seed:think>|<\|(?:START|END)_THINKING\|>"
            r"|<\|channel>thought(?:.*?<channel\|>|\s*$)|<\|think\|>",
            re.DOTALL,
        ),
        "Templates show reasoning in the last turns only, and open or close it for the next answer only.",
    ),
    RenderingDifference(
        "white_space", re.compile(r"\s+"), "Templates trim past answers, and not the opening of the next."
    ),
)
"""The differences that are ignored when two renderings are compared: each is removed, in this order, from the text
between an answer and the message before it."""

WRITTEN_STOPS = {
    "<|return|>": ("<|end|>", "gpt-oss ends an answer with <|return|>; its template shows past answers with <|end|>."),
}
"""Sampled stop token -> (another token that the template writes after past answers, the reason)."""

_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?', re.DOTALL)
"""Matches a string in valid JSON text. The second group matches only if the string is a key."""

Problem = Literal["answer_not_found", "no_end_of_turn", "other_end_of_turn", "message_lost", "history_changed"]


class RenderingError(Exception):
    """A conversation cannot be continued from exact tokens, because of `problem`."""

    def __init__(self, problem: Problem, detail: str = "") -> None:
        super().__init__(f"{problem}: {detail}")
        self.problem: Problem = problem


class Marking(NamedTuple):
    """The positions in the messages at which marks are put.

    Several markings are tried. A template may look for something at the beginning or the end of a text, such as a flag
    in the system message, and a mark there would hide it.
    """

    before: bool
    """Put a mark before the text of messages that are not answers."""
    after: bool
    """Put a mark after the text of messages that are not answers."""
    before_answers: bool
    """Put a mark before the text of answers, too. There is always a mark after the text of an answer."""
    empty_answers: bool
    """Put a mark into each answer without text, too. Otherwise only the tool calls of such an answer have marks, and
    these are lost if the template shows no tool calls."""


MARKINGS = tuple(
    Marking(before, after, before_answers, empty)
    for before, after, before_answers in (
        (True, True, True),
        (True, True, False),
        (True, False, False),
        (False, True, True),
        (False, True, False),
    )
    for empty in (False, True)
)
"""All markings, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class AfterAnswer:
    """Text that a template writes after the last answer: its stop token (empty if it writes none), and the rest."""

    stop: str
    suffix: str


class Marker:
    """Puts marks into messages, and finds them in a rendering. All marks begin with `word`, by default a random one."""

    def __init__(self, word: str | None = None) -> None:
        self._word = word or f"zq{secrets.token_hex(6)}"
        self._pattern = re.compile(f"{self._word}n([0-9]+)([cz])")

    def mark(self, messages: Sequence[Message], marking: Marking) -> tuple[Message, ...]:
        return tuple(self._marked(message, index, marking) for index, message in enumerate(messages))

    def unmark(self, text: str) -> str:
        return self._pattern.sub("", text)

    def extents(self, text: str, messages: Sequence[Message]) -> dict[int, tuple[int, int]]:
        """Return message index -> (beginning of the message's first mark, end of its last mark), positions in `text`.

        A tool call without text arguments has its mark in its name. Some templates repeat that name before the call's
        result. That mark is skipped, because it is not in the assistant message.
        """
        out: dict[int, tuple[int, int]] = {}
        names: Counter[int] = Counter()
        for found in self._pattern.finditer(text):
            index = int(found[1])
            if found[2] == "c":
                names[index] += 1
                if names[index] > sum(_has_no_strings(call) for call in messages[index].tool_calls):
                    continue
            out[index] = out.get(index, found.span())[0], found.end()
        return out

    def last_end(self, text: str) -> int:
        """Return the end of the last mark in a text; 0 if there is none."""
        return max((found.end() for found in self._pattern.finditer(text)), default=0)

    def _marked(self, message: Message, index: int, marking: Marking) -> Message:
        mark = f"{self._word}n{index}z"
        answer = message.role == "assistant"
        first = mark if (marking.before_answers if answer else marking.before) else ""
        last = mark if answer or marking.after else ""

        def around(text: str) -> str:
            words = text.strip()
            return text.replace(words, first + words + last, 1) if words else text

        content = message.content
        if isinstance(content, str) and content.strip():
            content = around(content)
        elif isinstance(content, list):
            content = [
                {**part, "text": around(part["text"])} if isinstance(part.get("text"), str) else part
                for part in content
            ]
        elif answer and marking.empty_answers:
            content = (content or "") + mark
        reasoning = around(message.reasoning) if message.reasoning else message.reasoning
        calls = tuple(
            replace(call, name=f"{call.name}{self._word}n{index}c")
            if _has_no_strings(call)
            else replace(call, arguments=_marked_arguments(call, mark, first, last))
            for call in message.tool_calls
        )
        return replace(message, content=content, reasoning=reasoning, tool_calls=calls)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _has_no_strings(call: ToolCall) -> bool:
    """Return whether the arguments hold no string that could be marked."""
    if not call.arguments.strip():
        return True
    return _is_json(call.arguments) and all(found[2] for found in _JSON_STRING.finditer(call.arguments))


def _marked_arguments(call: ToolCall, mark: str, first: str, last: str) -> str:
    """Return the arguments of a call with marks around their strings; the rest of the text stays as it is."""
    if not _is_json(call.arguments):
        return call.arguments + mark
    return _JSON_STRING.sub(lambda found: found[0] if found[2] else f'"{first}{found[1]}{last}"', call.arguments)


@dataclass(frozen=True, slots=True)
class MarkedRendering:
    """A rendering of messages with marks, cut into answers and the fixed texts between them (see the module)."""

    fixed: tuple[str, ...]
    """The texts before, between and after the answers, with marks. The last one begins after the last stop token."""
    answers: tuple[int, ...]
    """The indices of the messages that are answers and appear in the rendering."""
    stop: str
    """The stop token after the last answer; empty if there is none."""
    extents: dict[int, tuple[int, int]]
    """Message index -> (beginning of the message's first mark, end of its last mark), as positions in the rendering."""
    after: int
    """The position in the rendering at which the last fixed text begins."""


def compare_renderings(
    whole_text: str,
    front_text: str,
    messages: Sequence[Message],
    answer_end: int,
    marker: Marker,
    stops: Collection[str],
    opening: str | None = None,
) -> AfterAnswer:
    """Return the text that the template writes after the last answer among the first `answer_end` messages.

    `whole_text` is the rendering of all messages. `front_text` is the rendering of the messages before the answer. Both
    have marks. Raises RenderingError if the conversation cannot be continued, for instance because the fixed texts
    before the answer differ (`compare_fronts`).
    """
    whole = cut(whole_text, messages, answer_end, marker, stops)
    found = after_answer(whole, messages, answer_end, marker)
    answer_start = turn_start(messages, answer_end)
    compare_fronts(cut(front_text, messages, answer_start, marker, stops), whole, marker, opening)
    return found


def cut(text: str, messages: Sequence[Message], count: int, marker: Marker, stops: Collection[str]) -> MarkedRendering:
    """Cut a rendering at the answers among the first `count` messages.

    `stops` are the texts of the tokens that end an answer. Raises RenderingError if the answers are rendered in another
    order.
    """
    extents = marker.extents(text, messages)
    seen = [index for index in range(count) if messages[index].role == "assistant" and index in extents]
    pattern = re.compile("|".join(re.escape(stop) for stop in sorted(stops, key=len, reverse=True)))
    begins = sorted(begin for begin, _ in extents.values())
    fixed: list[str] = []
    position, stop = 0, ""
    for index in seen:
        start, end = extents[index]
        if start < position:
            raise RenderingError("history_changed", "the answers are rendered in another order")
        fixed.append(text[position:start])
        following = bisect_left(begins, end)
        limit = begins[following] if following < len(begins) else len(text)
        found = pattern.search(text, end, limit) if stops else None
        stop = found[0] if found else ""
        position = found.end() if found else end
    fixed.append(text[position:])
    return MarkedRendering(tuple(fixed), tuple(seen), stop, extents, position)


def compare_fronts(base: MarkedRendering, whole: MarkedRendering, marker: Marker, opening: str | None = None) -> None:
    """Check that the messages before the base's answer are still rendered as they were when that answer was sampled.

    The base is the earlier call that a new request continues. `base`: the marked rendering of the base's prompt;
    `whole`: the marked rendering of the new request. The fixed texts before the base's answer must be equal in both
    renderings, with two exceptions for the part after the last mark of a fixed text. First, IGNORED_DIFFERENCES do not
    count. Second, this part ends with the first characters of the next answer, up to the answer's first mark, so it may
    be longer in one rendering. No answer follows the last fixed text of `base`, so the last part of this text may be
    longer only in `whole`.

    `opening`: the text with which the template opened the base's answer. `whole` need not contain this text. Raises
    RenderingError if the renderings differ otherwise.
    """
    if base.answers != whole.answers[: len(base.answers)] or len(base.fixed) > len(whole.fixed) - 1:
        raise RenderingError("history_changed", "the template shows other past answers than before")
    last = len(base.fixed) - 1
    for index, (before, now) in enumerate(zip(base.fixed, whole.fixed, strict=False)):
        if before == now:
            continue
        (marked, tail), (marked_now, tail_now) = _parts(before, marker), _parts(now, marker)
        if index == last and opening:
            tail = tail.removesuffix(opening)
        if marked != marked_now:
            raise RenderingError("history_changed", _describe_difference(marked, marked_now))
        one, two = _essential(tail), _essential(tail_now)
        if not (two.startswith(one) or (index < last and one.startswith(two))):
            raise RenderingError("history_changed", _describe_difference(one, two))


def _parts(fixed: str, marker: Marker) -> tuple[str, str]:
    """Split a fixed text (one that is outside of the answers) after the last mark in it; return both parts."""
    end = marker.last_end(fixed)
    return fixed[:end], fixed[end:]


def _essential(text: str) -> str:
    for difference in IGNORED_DIFFERENCES:
        text = difference.pattern.sub("", text)
    return text


def _describe_difference(one: str, two: str) -> str:
    start = first_difference(one, two)
    return f"{one[start : start + 40]!r} is now {two[start : start + 40]!r}"


def after_answer(whole: MarkedRendering, messages: Sequence[Message], answer_end: int, marker: Marker) -> AfterAnswer:
    """Return what the template writes after the answer `messages[answer_end - 1]`.

    Raises RenderingError if the answer or a later message is not found in the rendering, or if the answer's end cannot
    be determined."""
    if not whole.answers or whole.answers[-1] != answer_end - 1:
        raise RenderingError("answer_not_found")
    for index in range(answer_end, len(messages)):
        extent = whole.extents.get(index)
        if _has_text(messages[index]) and (extent is None or extent[0] < whole.after):
            raise RenderingError("message_lost", f"message {index + 1} is not rendered after the last answer")
    if any(begin < whole.after for index, (begin, _) in whole.extents.items() if index >= answer_end):
        raise RenderingError("message_lost", "a new message is not rendered after the last answer")
    if not whole.stop and not _end_is_marked(messages[answer_end - 1]):
        raise RenderingError("no_end_of_turn", "neither a stop token nor a mark shows where the answer ends")
    return AfterAnswer(whole.stop, marker.unmark(whole.fixed[-1]))


def _end_is_marked(answer: Message) -> bool:
    """Return whether the answer ends with the mark after its text: neither tool calls nor white space follow."""
    text = answer.content[-1].get("text") if isinstance(answer.content, list) and answer.content else answer.content
    return not answer.tool_calls and isinstance(text, str) and bool(text) and not text[-1].isspace()


def _has_text(message: Message) -> bool:
    content = message.content
    texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return any(text and text.strip() for text in texts)
