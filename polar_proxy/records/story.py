"""The calls of a session for people to read: each with its new messages, its new tool results and its answer. Long
texts are shortened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import orjson

from polar_proxy import api_models as m
from polar_proxy.dialects import parse_recorded
from polar_proxy.dialects.base import ParsedRequest
from polar_proxy.errors import RequestError
from polar_proxy.message_text import content_text
from polar_proxy.records import convert
from polar_proxy.sessions.lineage_reasons import reason_of
from polar_proxy.store.repositories.calls import CallSummary
from polar_proxy.types import CallRecord, Choice, Message, TextRequest

_HEAD, _TAIL = 3000, 1000
"""Number of characters that are kept at the beginning and at the end of a long text. The middle is left out."""
COMMAND_LENGTH = 120


def session_calls(
    summaries: Sequence[CallSummary], calls: Sequence[CallRecord], texts: dict[str, list[list[str]]] | None
) -> list[m.SessionCall]:
    """Return the calls of a session, each with its answer and with the messages that its parent does not have.

    `summaries` and `calls` are in the same order. `texts`: call id -> the token texts of the call's answers. If `texts`
    is given, the returned calls also have their tokens. Time and size are O(new messages), because a message that a
    call shares with its parent is left out.
    """
    records = {call.call_id: call for call in calls}
    reader = _NewMessages()
    found = []
    for row in summaries:
        call = records.get(row.call_id)  # None: committed after the records were read
        new = [] if call is None else reader.read(call)
        choices = () if call is None else call.choices
        found.append(
            convert(
                m.SessionCall,
                row,
                reason=reason_of(row.rule),
                new_messages=new,
                answer=_story_message(choices[0].message, {}) if choices else None,
                answers=[] if texts is None else call_choices(choices, texts.get(row.call_id)),
            )
        )
    return found


def call_choices(choices: Sequence[Choice], texts: Sequence[list[str]] | None) -> list[m.CallChoice]:
    """Return the answers of a call with their tokens. `texts`: the texts of each answer's tokens, if known."""
    return [
        m.CallChoice(
            index=choice.index,
            message=choice.message.to_openai(),
            finish_reason=choice.finish_reason,
            token_ids=choice.token_ids.tolist(),
            logprobs=[None if math.isnan(value) else value for value in choice.logprobs.tolist()],
            token_texts=None if texts is None else texts[position],
        )
        for position, choice in enumerate(choices)
    ]


def last_command(message: Message) -> str:
    """Return the command of an answer's last tool call, or the answer's text if the answer has no tool call. The result
    is one line, cut to `COMMAND_LENGTH` characters."""
    if message.tool_calls:
        arguments = message.tool_calls[-1].arguments
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            value = arguments
        if isinstance(value, dict):
            value = value.get("command") or value.get("cmd") or arguments
        return " ".join(str(value).split())[:COMMAND_LENGTH]
    return " ".join(str(message.content or "").split())[:COMMAND_LENGTH]


class _NewMessages:
    """Finds the messages of a call that are not in the call's parent. Messages are parsed once."""

    def __init__(self) -> None:
        self._last_parsed: dict[str, ParsedRequest] = {}
        self._messages: dict[str, Sequence[Message]] = {}
        """Call id -> messages of its request."""

    def read(self, call: CallRecord) -> list[m.StoryMessage]:
        try:
            parsed = parse_recorded(call, self._last_parsed.get(call.dialect))
        except RequestError as error:
            return [m.StoryMessage(role="raw", text=f"cannot be parsed: {error}")]
        self._last_parsed[call.dialect] = parsed
        (request,) = parsed.requests
        if isinstance(request, TextRequest):
            text, left_out = _cut(request.prompt if isinstance(request.prompt, str) else str(list(request.prompt)))
            return [m.StoryMessage(role="prompt", text=text, left_out=left_out)]
        messages = self._messages[call.call_id] = request.messages
        earlier = self._messages.get(call.parent_call_id or "", ())
        shared = 0
        for one, known in zip(messages, earlier, strict=False):
            if one is not known and one != known:
                break
            shared += 1
        tools = {used.id: used.name for message in messages for used in message.tool_calls}
        return [_story_message(one, tools) for one in _without_answer(messages[shared:], shared)]


def _without_answer(new: Sequence[Message], shared: int) -> Iterator[Message]:
    """Yield the new messages. If they begin with the parent's answer, leave it out, because it is shown with the
    parent."""
    answer = bool(shared)
    for message in new:
        answer = answer and message.role == "assistant"
        if not answer:
            yield message


def _story_message(message: Message, tools: dict[str, str]) -> m.StoryMessage:
    """Return a message, shortened. `tools`: tool call id -> name of the tool."""
    text, left_out = _cut(content_text(message.content))
    reasoning, more = _cut(message.reasoning or "")
    return m.StoryMessage(
        role=message.role,
        text=text,
        left_out=left_out + more,
        reasoning=reasoning or None,
        tool=tools.get(message.tool_call_id or "") or message.name,
        tool_calls=[
            m.StoryToolCall(name=one.name, arguments=arguments, left_out=rest)
            for one in message.tool_calls
            for arguments, rest in [_cut(one.arguments)]
        ],
    )


def _cut(text: str) -> tuple[str, int]:
    """Return the text without its middle if it is long, and the number of characters that were left out."""
    if len(text) <= _HEAD + _TAIL:
        return text, 0
    left_out = len(text) - _HEAD - _TAIL
    return f"{text[:_HEAD]}\n[{left_out} characters left out]\n{text[-_TAIL:]}", left_out
