"""The messages of several runs side by side: aligned on their common beginning, with the first difference marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar_proxy.export.conversations import conversation
from polar_proxy.message_text import content_text
from polar_proxy.store.repositories.calls import CallSummary
from polar_proxy.types import CallRecord, Edge, Json, TokenIds
from polar_proxy.view.conversation import readable_arguments

_LONGEST = 4000
"""Maximum number of characters of a message that are shown, around its first difference. The page of the run has the
whole message."""
_BEFORE = 400
"""Number of characters that are shown before the first difference of a long message."""
_SIDE_EDGES: frozenset[Edge] = frozenset({"side_call", "subagent"})


@dataclass(frozen=True, slots=True)
class RunMessage:
    """A message of a run as text: reasoning, content, and tool calls by name and arguments, without their ids."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A message in its column. `same` is the text that all columns share, `different` the first differing word, and
    `rest` what follows it. Without a difference, everything is in `rest`."""

    role: str
    same: str
    different: str
    rest: str
    is_cut: bool
    """True if the message is longer than what is shown."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """The messages of several runs. `shared`: the messages with which all runs begin. `rows`: the later messages, with
    one cell per run; the cell is None after the run's last message. The first row has the first difference."""

    shared: Sequence[Cell]
    rows: Sequence[Sequence[Cell | None]]


def main_call(calls: Sequence[CallSummary]) -> CallSummary | None:
    """Return the agent's answered call with the longest conversation; None if the agent has no answered call.

    Calls with the edge `side_call` or `subagent`, and all calls that descend from these calls, do not count. `calls`
    are ordered by start.
    """
    side_calls: set[str] = set()
    own = []
    for call in calls:
        if call.edge in _SIDE_EDGES or call.parent_call_id in side_calls:
            side_calls.add(call.call_id)
        elif call.choices:
            own.append(call)
    return max(own, key=lambda call: (call.message_count, call.started_at), default=None)


def read_messages(call: CallRecord) -> list[RunMessage]:
    """Return the messages of a call's request and its first answer."""
    request = conversation(call)
    if "unparsed" in request:
        messages = [RunMessage("raw", message.decode(errors="replace")) for message in call.messages]
    else:
        messages = [_read(message) for message in request["messages"]]
    return messages + [_read(choice.message.to_openai()) for choice in call.choices[:1]]


def _read(message: Json) -> RunMessage:
    parts = [message.get("reasoning_content") or "", content_text(message.get("content"))]
    for tool_call in message.get("tool_calls") or ():
        function = tool_call["function"]
        parts.append(f"{function['name']}\n{readable_arguments(function['arguments'])}")
    texts = (part.strip("\n") for part in parts)  # models put blank lines around reasoning
    return RunMessage(message["role"], "\n".join(text for text in texts if text))


def align(runs: Sequence[Sequence[RunMessage]]) -> Alignment:
    """Align runs message by message. Runs that only differ in length share all messages of the shortest."""
    shared = _shared_length(runs)
    rows = []
    for number in range(shared, max(map(len, runs), default=0)):
        messages = [run[number] if number < len(run) else None for run in runs]
        difference = _first_difference(messages) if number == shared else None
        rows.append([None if one is None else _cell(one, difference) for one in messages])
    return Alignment([_cell(message, None) for message in runs[0][:shared]] if runs else [], rows)


def _first_difference(messages: Sequence[RunMessage | None]) -> int:
    """Return the position of the first character that differs between the messages; 0 if a run has no message here."""
    texts = [one.text for one in messages if one is not None]
    return _shared_length(texts) if len(texts) == len(messages) else 0


def _shared_length(sequences: Sequence[Sequence[object]]) -> int:
    """Return the length of the longest common prefix of all sequences."""
    shortest = min(map(len, sequences), default=0)
    return next((at for at in range(shortest) if len({sequence[at] for sequence in sequences}) > 1), shortest)


def _cell(message: RunMessage, difference: int | None) -> Cell:
    """Return a message as a cell. `difference`: the position of its first difference, None without one."""
    text = message.text
    start = 0
    if difference is not None and difference > _LONGEST - _BEFORE:
        start = difference - _BEFORE
    shown = text[start : start + _LONGEST]
    is_cut = len(shown) < len(text)
    if difference is None:
        return Cell(message.role, "", "", shown, is_cut)
    same, changed = shown[: difference - start], shown[difference - start :]
    word = changed.split(maxsplit=1)[0] if changed.strip() else ""
    end = changed.index(word) + len(word)
    return Cell(message.role, same, changed[:end], changed[end:], is_cut)


def shared_tokens(sequences: Sequence[TokenIds]) -> int:
    """Return the length of the longest common prefix of all sequences, in tokens."""
    length = min(map(len, sequences), default=0)
    for other in sequences[1:]:
        differing = np.flatnonzero(sequences[0][:length] != other[:length])
        length = int(differing[0]) if len(differing) else length
    return length
