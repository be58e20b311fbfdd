"""Incremental parser for answers in the Hermes format: `<think>` reasoning, text,
`<tool_call>{"name": .., "arguments": ..}</tool_call>`.

Invariants, each tested:

* The result does not depend on where the text is cut into chunks.
* No character is lost. A tool call that does not parse becomes text; a tool call is therefore held back until it is
  complete. Only the format's own characters disappear: the tags, and white space that merely separates blocks (after
  `</think>` or around a tool call).
* `arguments` is the exact text of the JSON value that was sampled, not parsed and printed again.

A tool call has the form that vLLM's hermes parser accepts: strict JSON with a string `name` and with `arguments`,
followed by an end tag or the end of the answer. Unlike in vLLM's parser, `</tool_call>` inside a JSON string does not
end the tool call, and text after a tool call is kept.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from json import JSONDecodeError, JSONDecoder
from typing import Literal

from polar_proxy.types import SampleEvent, ToolDelta

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"

Reasoning = Literal["off", "tags", "open", "implied", "implied_call"]
"""How an answer's reasoning is recognised.

off: answers of this model have none; tags: an answer may begin with `<think>`; open: the prompt ended inside the
reasoning; implied: every answer begins in reasoning, with or without a `<think>` tag; implied_call: the same,
and a tool call ends the reasoning as `</think>` does. (vLLM's reasoning parsers are of the last two kinds.)"""

PROMPT_TAIL = 16
"""Number of tokens at the end of a prompt in which an open reasoning tag is looked for."""
_JSON = JSONDecoder()
_MARK = re.compile(rf'"|\\.|{END_CALL}', re.DOTALL)
_SEPARATORS = re.compile(r"[ \t\r\n,:]*")


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class HermesParser:
    """Parser of one answer, which arrives event by event."""

    def __init__(self, *, tools: bool, reasoning: Reasoning = "off", make_id: Callable[[], str] = new_call_id) -> None:
        self._tools = tools
        self._make_id = make_id
        self._buffer = ""
        # A bound method would be a reference cycle, so that only the garbage collector could free a parser.
        first = {"off": HermesParser._text, "open": HermesParser._think}
        self._state: Callable[[HermesParser, bool], bool] = first.get(reasoning, HermesParser._start)
        self._implied = reasoning in ("implied", "implied_call")
        self._call_ends_thought = tools and reasoning == "implied_call"
        self._blank = ""
        """White space at the beginning of a block. It becomes text if other text follows, or if the answer ends without
        a tool call."""
        self._has_content = False
        """Whether text was found since the start or the last tool call."""
        self._scan = _EndTagScanner()
        self._out_text: list[str] = []
        self._out_reasoning: list[str] = []
        self._out_calls: list[ToolDelta] = []
        self._calls = 0

    def parse(self, event: SampleEvent) -> SampleEvent:
        """Return the event with its raw text replaced by the text, reasoning and tool calls that are now complete.

        An event with a finish reason also gets the rest that was held back. Its finish reason `stop` becomes
        `tool_calls` if the answer has tool calls.
        """
        finish = event.finish_reason
        if not event.text and finish is None:
            return event
        self._buffer += event.text
        while self._state(self, finish is not None):
            pass
        if finish is not None and not self._calls:
            self._out_text.append(self._blank)
        parsed = replace(
            event,
            text="".join(self._out_text),
            reasoning="".join(self._out_reasoning),
            tool_calls=tuple(self._out_calls),
            finish_reason="tool_calls" if finish == "stop" and self._calls else finish,
        )
        self._out_text, self._out_reasoning, self._out_calls = [], [], []
        return parsed

    # Each state consumes a part of the buffer and returns whether the next state may consume more.

    def _start(self, final: bool) -> bool:
        """State until the answer has text other than white space. Only in this state is `<think>` a tag."""
        body = self._buffer.lstrip()
        if body.startswith(THINK):
            self._buffer = body[len(THINK) :]
            self._state = HermesParser._think
            return True
        if not final and THINK.startswith(body):
            return False
        self._state = HermesParser._think if self._implied else HermesParser._text
        return True

    def _think(self, final: bool) -> bool:
        ends = (END_THINK, CALL) if self._call_ends_thought else (END_THINK,)
        found = min((place for tag in ends if (place := self._buffer.find(tag)) >= 0), default=None)
        if found is None:
            self._out_reasoning.append(self._release(ends, final))
            return False
        self._out_reasoning.append(self._buffer[:found])
        self._buffer = self._buffer[found:].removeprefix(END_THINK)
        self._state = HermesParser._text
        return True

    def _text(self, final: bool) -> bool:
        if not self._tools:
            self._add_text(self._buffer)
            self._buffer = ""
            return False
        head, tag, rest = self._buffer.partition(CALL)
        if tag:
            self._add_text(head)
            self._buffer = rest
            self._scan = _EndTagScanner()
            self._state = HermesParser._call
            return True
        self._add_text(self._release((CALL,), final))
        return False

    def _call(self, final: bool) -> bool:
        """State after `<tool_call>`: hold back everything up to the first end tag outside JSON strings."""
        end = self._scan.find_end(self._buffer)
        if end is not None:
            return self._finish_call(self._buffer[:end], self._buffer[end + len(END_CALL) :], END_CALL)
        if not final:
            return False
        if not parse_call(self._buffer) and END_CALL in self._buffer:
            # An end tag inside a JSON string that is never closed ends the tool call after all.
            head, _, rest = self._buffer.partition(END_CALL)
            return self._finish_call(head, rest, END_CALL)
        return self._finish_call(self._buffer, "", "")

    def _finish_call(self, body: str, rest: str, end_tag: str) -> bool:
        self._buffer = rest
        self._state = HermesParser._text
        call = parse_call(body)
        if call is None:
            self._add_text(CALL + body + end_tag)
            return True
        self._blank, self._has_content = "", False
        self._out_calls.append(ToolDelta(self._calls, self._make_id(), *call))
        self._calls += 1
        return True

    def _add_text(self, text: str) -> None:
        """Append text. White space at the beginning of a block is held back until other text follows."""
        if self._has_content:
            self._out_text.append(text)
        elif text.strip():
            self._out_text.append(self._blank + text)
            self._blank, self._has_content = "", True
        else:
            self._blank += text

    def _release(self, tags: tuple[str, ...], final: bool) -> str:
        """Remove the buffered text and return it. Unless `final`, keep the last characters that may begin a tag."""
        cut = len(self._buffer) if final else possible_start(self._buffer, tags)
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text


def reasoning_kind(template: str | None, prompt: str) -> Reasoning:
    """Return how answers to this rendered prompt mark reasoning: `off`, `tags` or `open` (see `Reasoning`).

    `template`: the source of the chat template that rendered it.
    """
    if template is None or THINK not in template:
        return "off"
    return "open" if prompt.rstrip().endswith(THINK) else "tags"


def possible_start(text: str, words: Sequence[str]) -> int:
    """Return the start of the longest suffix of `text` that is a proper prefix of one of `words`.

    Returns len(text) if there is no such suffix.
    """
    longest = max(map(len, words), default=1) - 1
    for place in range(max(len(text) - longest, 0), len(text)):
        if any(word.startswith(text[place:]) for word in words):
            return place
    return len(text)


class _EndTagScanner:
    """Search for the first end tag outside JSON strings. It resumes where it stopped, so n characters cost O(n)."""

    def __init__(self) -> None:
        self._at = 0
        self._inside = False

    def find_end(self, text: str) -> int | None:
        while mark := _MARK.search(text, self._at):
            found = mark.group()
            if found == END_CALL and not self._inside:
                return mark.start()
            if found == '"':
                self._inside = not self._inside
            escapes_nothing = found[0] == "\\" and not self._inside
            self._at = mark.start() + 1 if escapes_nothing else mark.end()
        # The end of the text may be the beginning of a mark.
        self._at = max(self._at, len(text) - len(END_CALL) + 1)
        return None


def parse_call(body: str) -> tuple[str, str] | None:
    """Return (name, exact text of the arguments) of the tool call between two tags; None if it is malformed."""
    text = body.strip(" \t\r\n")
    try:
        value, end = _JSON.raw_decode(text)
    except (JSONDecodeError, RecursionError):
        return None
    if end != len(text) or not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name or "arguments" not in value:
        return None
    start, stop = _member(text, "arguments")
    return name, text[start:stop]


def _member(text: str, wanted: str) -> tuple[int, int]:
    """Return (start, end) of the value of the key `wanted` in `text`, a valid JSON object; (0, 0) without this key.

    If the object has the key twice, the last value counts. Keys of nested objects do not count.
    """
    place, found = text.index("{") + 1, (0, 0)
    while True:
        place = _skip_separators(text, place)
        if text[place] == "}":
            return found
        key, place = _JSON.raw_decode(text, place)
        start = _skip_separators(text, place)
        _, place = _JSON.raw_decode(text, start)
        if key == wanted:
            found = (start, place)


def _skip_separators(text: str, place: int) -> int:
    match = _SEPARATORS.match(text, place)
    return match.end() if match else place
