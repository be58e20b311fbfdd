"""16-byte hashes of messages by their meaning, and of conversations as chains of message hashes.

Two messages with the same meaning have the same digest, whatever their bytes; `NORMALISERS` lists the differences that
are ignored. Ids of tool calls are not part of the meaning, because some harnesses make their own. The ids are kept with
the digest, to choose between conversations that mean the same.

Neighbouring assistant messages count as one turn, because some dialects send text and tool calls as separate items, and
some harnesses split a turn.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import orjson

from polar_proxy.errors import UsageError
from polar_proxy.types import Json, Message

EMPTY = b"\0" * 16
VERSION = b"2"
"""Part of every key, so that keys that were stored under older rules are not found."""

_MERGED_SO_FAR = 16
"""In a long assistant turn, this many keys are each made from all messages of the turn so far, merged into one. Merging
for every key would take quadratic time, so each later key is made from the key before it and one more message."""
_LONGEST_NORMALISED = 4 << 20
"""Length in characters above which a text is not searched for patterns. No model reads such a text, and each search
would take long."""
_SAFE_INTEGER = 2**53
_ROLES = {"developer": "system", "function": "tool"}
_SORTED = orjson.OPT_SORT_KEYS
_WHITE_SPACE = bytes(code for code in range(128) if chr(code).isspace())


@dataclass(frozen=True, slots=True)
class Normaliser:
    """A rule that makes the hashes of messages ignore one kind of difference.

    `pattern` finds the text to replace before hashing. Normalisers without a pattern are code in `MessageHasher`.
    """

    name: str
    reason: str
    seen: str
    """The harnesses, with their versions, in which this difference was observed."""
    roles: frozenset[str] = frozenset()
    guard: str = ""
    """A text without this string is not searched for `pattern`, because the search for `pattern` takes longer."""
    pattern: re.Pattern[str] | None = None
    """A search for the pattern must take linear time in any text: clients write the texts, and all other calls wait
    during the search."""
    replacement: str | Callable[[re.Match[str]], str] = ""


_OPENING = frozenset({"system", "user"})
_REASONING_IN_TEXT = re.compile(r"\A<think(?:ing)?>(.*?)</think(?:ing)?>", re.DOTALL)

NORMALISERS: tuple[Normaliser, ...] = (
    Normaliser(
        "string_or_blocks",
        "A string and a list of text blocks with the same text are the same to every template.",
        "Claude Code 2.1.329 alternates between the two each turn",
    ),
    Normaliser(
        "cache_marks",
        "`cache_control` says where a provider should cache; the model does not see it.",
        "Claude Code 2.1.329, Pi 0.87.1, opencode 1.18.33, OpenHands 1.16.0: moves each turn",
    ),
    Normaliser(
        "reasoning",
        "Harnesses drop, cut or sign the reasoning of earlier turns, so it cannot distinguish turns.",
        "OpenHands 1.16.0 and aider 0.86.2 drop it, Gemini CLI 0.61.0 keeps its signature only",
    ),
    Normaliser(
        "reasoning_in_text",
        "An answer's text begins with its reasoning, because the engine does not separate them (vLLM without "
        "`--reasoning-parser`), and the client moves it to `reasoning_content`. `AssistantTurn.spelling` compares it.",
        "LiteLLM 1.110.2 (mini-swe-agent 2.4.6)",
        frozenset({"assistant"}),
        "</think",
        _REASONING_IN_TEXT,
    ),
    Normaliser(
        "json_arguments",
        "Arguments come back parsed and serialised again: other spacing, key order and number forms.",
        "Qwen Code 0.24.4, Pi 0.87.1, opencode 1.18.33, Cline 3.0.65, Claude Code 2.1.329",
    ),
    Normaliser(
        "white_space",
        "White space around texts and between their blocks is stripped or added on the way. In an answer, whose blocks "
        "are joined in one text, no white space counts; `AssistantTurn.spelling` still distinguishes such answers.",
        "aider 0.86.2 strips the end of a text; models begin their answers with line breaks that others strip",
    ),
    Normaliser(
        "repeated_results",
        "The same tool result is sent twice in a row after a resume.",
        "Gemini CLI 0.61.0: functionResponse parts are doubled by `-r latest`",
    ),
    Normaliser(
        "claude_billing_line",
        "The first system block has a billing line that changes with every request.",
        "Claude Code 2.1.329",
        frozenset({"system"}),
        "x-anthropic-billing-header:",
        re.compile(r"x-anthropic-billing-header:(?:(?!cch=)[^\n])*+(?:cch=[^;\n]*+;|[^\n]*+\n?)\n?"),
    ),
    Normaliser(
        "gemini_session_context",
        "The block with date and directory listing is regenerated when a session is resumed.",
        "Gemini CLI 0.61.0",
        frozenset({"user"}),
        "<session_context>",
        re.compile(r"<session_context>(?:.*?</session_context>|(?P<unclosed>.*))", re.DOTALL),
        lambda found: "<session_context/>" if found["unclosed"] is None else found[0],
    ),
    Normaliser(
        "aider_rules_reminder",
        "The reminder of the edit format is appended to the newest user message only.",
        "aider 0.86.2",
        frozenset({"user"}),
        "# *SEARCH/REPLACE block* Rules:",
        re.compile(r"(?<!\s)\s*+# \*SEARCH/REPLACE block\* Rules:\n.*", re.DOTALL),
    ),
    Normaliser(
        "launch_datetime",
        "The launch time, to the microsecond, is part of the prompt and changes when a session is resumed.",
        "OpenHands 1.16.0",
        _OPENING,
        "The current date and time is:",
        re.compile(r"The current date and time is: [^\n<]*"),
        "The current date and time is:",
    ),
    Normaliser(
        "launch_date",
        "The launch date is part of the prompt and changes when a session is resumed on another day.",
        "Claude Code 2.1.329, Qwen Code 0.24.4, Gemini CLI 0.61.0",
        _OPENING,
        "Today's date is ",
        re.compile(r"Today's date is [^\n<]{0,60}"),
        "Today's date is",
    ),
)


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """An assistant turn, in a request or as the answer of a call. The keys cover this and all earlier turns."""

    end: int
    """Number of the conversation's messages up to the end of this turn."""
    assistant_chain: bytes
    """Key of the meaning of this and all earlier turns, whatever messages are between them."""
    ids_chain: bytes
    """Key of the ids of the tool calls in this and all earlier turns."""
    spelling: bytes
    """Key of the text and reasoning of this and all earlier turns. White space inside a text counts."""
    digest: bytes
    """Digest of this turn alone."""
    exchange: bytes
    """Digest of this turn with the message before it."""
    ids: tuple[str, ...]
    """Ids of the turn's tool calls."""
    length: int
    """Number of characters of the turn's text and of its tool calls' arguments."""


@dataclass(frozen=True, slots=True)
class AnswerNode:
    """An answer of a call, as the index of a session's calls keeps it."""

    conversation_key: bytes
    """Key of the conversation that ends with this answer."""
    turn: AssistantTurn
    """The answer, together with any assistant messages at the end of the request, because they form one turn."""


@dataclass(frozen=True, slots=True)
class HashChain:
    """The keys of a conversation: `keys[i]` identifies its first i messages, `keys[0]` the empty conversation."""

    keys: tuple[bytes, ...]
    turns: tuple[AssistantTurn, ...]
    last_digest: bytes
    """Digest of the last message, or of the last turn if that message is the assistant's; empty without messages."""

    def ids_chain(self, end: int | None = None) -> bytes:
        """Return one hash of the ids of all tool calls, or of the tool calls in the first `end` messages."""
        return next((turn.ids_chain for turn in reversed(self.turns) if end is None or turn.end <= end), EMPTY)


@dataclass(frozen=True, slots=True)
class HashedConversation:
    """A conversation and its keys. A longer conversation that begins with the same messages reuses these keys."""

    messages: tuple[Message, ...]
    chain: HashChain


class MessageHasher:
    """Hashes messages with all normalisers except the ones named in `off`. Raises UsageError if `off` has an unknown
    name."""

    def __init__(self, off: Iterable[str] = ()) -> None:
        names = {item.name for item in NORMALISERS}
        if unknown := set(off) - names:
            raise UsageError(
                f"gateway.normalisers_off names unknown normalisers: {', '.join(sorted(unknown))}. "
                f"The known ones are {', '.join(sorted(names))}."
            )
        names.difference_update(off)
        self._active = frozenset(names)
        self._patterns: defaultdict[str, list[Normaliser]] = defaultdict(list)
        """The active normalisers with a pattern, by the roles of the messages in which they search."""
        for item in NORMALISERS:
            if item.name in names and item.pattern is not None:
                for role in item.roles:
                    self._patterns[role].append(item)
        self._root = hashlib.blake2b(orjson.dumps(sorted(names)) + VERSION, digest_size=16).digest()

    def chain(self, messages: Sequence[Message], previous: HashedConversation | None = None) -> HashChain:
        """Return the keys of a conversation. Messages that it has in common with `previous` are not hashed again."""
        keys: list[bytes] = [self._root]
        turns: list[AssistantTurn] = []
        last = b""
        if previous is not None and (start := _shared_prefix(messages, previous.messages)):
            known = previous.chain
            keys = list(known.keys[: start + 1])
            turns = list(known.turns[: bisect_right(known.turns, start, key=lambda turn: turn.end)])
            if start == len(previous.messages):
                last = known.last_digest
            else:
                last = turns[-1].digest if turns and turns[-1].end == start else self.digest(messages[start - 1])
        for is_turn, group in groupby(messages[len(keys) - 1 :], key=lambda message: message.role == "assistant"):
            if is_turn:
                run = list(group)
                turn = self._turn(run, len(keys) - 1 + len(run), turns[-1] if turns else None, last)
                turns.append(turn)
                keys += self._turn_keys(run, keys[-1], turn.digest)
                last = turn.digest
                continue
            results: set[tuple[bytes, str | None]] = set()
            for message in group:
                last = self.digest(message)
                result = (last, message.tool_call_id)
                keys.append(keys[-1] if result in results else _link(keys[-1], last))
                if message.role in ("tool", "function") and "repeated_results" in self._active:
                    results.add(result)
        return HashChain(tuple(keys), tuple(turns), last)

    def _turn_keys(self, run: Sequence[Message], key_before: bytes, digest: bytes) -> list[bytes]:
        """Return the key after each message of the assistant turn `run`. `digest` is the digest of the whole turn."""
        keys: list[bytes] = []
        for length in range(1, len(run)):
            if length <= _MERGED_SO_FAR:
                keys.append(_link(key_before, self.digest(_merge(run[:length]))))
            else:
                keys.append(_link(keys[-1], self.digest(run[length - 1])))
        return [*keys, _link(key_before, digest)]

    def answer_node(self, conversation: HashedConversation, answer: Message) -> AnswerNode:
        """Return the node of an answer to a conversation.

        If the conversation ends with assistant messages, the answer and these messages are one turn.
        """
        messages, chain = conversation.messages, conversation.chain
        start = turn_start(messages, len(messages))
        prefilled = start < len(messages)
        turns = chain.turns[:-1] if prefilled else chain.turns
        last = chain.last_digest if not prefilled else self.digest(messages[start - 1]) if start else b""
        turn = self._turn([*messages[start:], answer], len(messages) + 1, turns[-1] if turns else None, last)
        return AnswerNode(_link(chain.keys[start], turn.digest), turn)

    def _turn(self, run: Sequence[Message], end: int, before: AssistantTurn | None, preceding: bytes) -> AssistantTurn:
        """Return the turn of neighbouring assistant messages. `before`: the turn before this one. `preceding`: the
        digest of the message before this turn."""
        whole = _merge(run)
        digest, ids = self.digest(whole), call_ids(whole)
        spelling = hash_json(text_and_reasoning(whole))
        return AssistantTurn(
            end,
            assistant_chain=_link(before.assistant_chain if before else EMPTY, digest),
            ids_chain=_link(before.ids_chain if before else EMPTY, hash_json(ids)),
            spelling=_link(before.spelling if before else EMPTY, spelling),
            digest=digest,
            exchange=_link(preceding, digest),
            ids=ids,
            length=text_length(whole),
        )

    def digest(self, message: Message) -> bytes:
        """Return the 16-byte digest of a message."""
        role = _ROLES.get(message.role, message.role)
        content = self._content(role, message.content)
        if isinstance(content, str):
            content = self._text(role, content)
        calls = [(call.name, self._canonical_arguments(call.arguments)) for call in message.tool_calls]
        reasoning = None if "reasoning" in self._active else self._text(role, message.reasoning or "")
        return hash_json([role, content, calls, reasoning])

    def _text(self, role: str, text: str) -> str:
        if len(text) > _LONGEST_NORMALISED:
            return text
        for item in self._patterns.get(role, ()):
            if item.pattern is not None and item.guard in text:
                text = item.pattern.sub(item.replacement, text)
        if "white_space" in self._active:
            return without_white_space(text) if role == "assistant" else text.strip()
        return text

    def _content(self, role: str, content: str | list[Json] | None) -> Any:
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        parts = [part for part in content if not ("reasoning" in self._active and part.get("type") in _THINKING)]
        if "string_or_blocks" in self._active and all(part.get("type") == "text" for part in parts):
            return "".join(str(part.get("text", "")) for part in parts)
        kept = []
        for part in parts:
            if "cache_marks" in self._active and "cache_control" in part:
                part = {key: value for key, value in part.items() if key != "cache_control"}
            if part.get("type") == "text" and isinstance(part.get("text"), str):
                part = {**part, "text": self._text(role, part["text"])}
            kept.append(part)
        return [orjson.dumps(kept, option=_SORTED).decode()]  # a list never equals a text

    def _canonical_arguments(self, arguments: str) -> str:
        if "json_arguments" not in self._active:
            return arguments
        if not arguments.strip():
            return "{}"
        try:
            return orjson.dumps(_canonical_numbers(orjson.loads(arguments)), option=_SORTED).decode()
        except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):  # not JSON, or nested too deeply
            return arguments


_THINKING = frozenset({"thinking", "redacted_thinking", "reasoning"})


def without_white_space(text: str) -> str:
    # `translate` is several times as fast as `split`, but for ASCII only.
    return text.encode().translate(None, _WHITE_SPACE).decode() if text.isascii() else "".join(text.split())


def call_ids(message: Message) -> tuple[str, ...]:
    return tuple(call.id for call in message.tool_calls if call.id)


def text_of(message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if part.get("type") == "text")


def text_and_reasoning(message: Message) -> tuple[str, str]:
    """Return the text and the reasoning of an answer, without white space around them.

    Reasoning at the beginning of the text is separated from it.
    """
    text, reasoning = text_of(message), message.reasoning or ""
    if (found := _REASONING_IN_TEXT.match(text)) is not None:
        text, reasoning = text[found.end() :], reasoning + found[1]
    return text.strip(), reasoning.strip()


def text_length(message: Message) -> int:
    """Return the number of characters in a message's text and in the arguments of its tool calls."""
    return len(text_of(message)) + sum(len(call.arguments) for call in message.tool_calls)


def hash_json(value: Any) -> bytes:
    """Return a 16-byte digest of a value's JSON."""
    return hashlib.blake2b(orjson.dumps(value), digest_size=16).digest()


def _link(key: bytes, digest: bytes) -> bytes:
    return hashlib.blake2b(key + digest, digest_size=16).digest()


def _shared_prefix(messages: Sequence[Message], others: Sequence[Message]) -> int:
    """Return how many messages at the beginning are the same objects in both conversations. Count only up to the
    beginning or the end of an assistant turn.

    Hashing can go on from there, because no message before this place is merged with a message after it.
    """
    same = 0
    for one, other in zip(messages, others, strict=False):
        if one is not other:
            break
        same += 1
    while same and not _is_edge_of_turn(messages, others, same):
        same -= 1
    return same


def _is_edge_of_turn(messages: Sequence[Message], others: Sequence[Message], at: int) -> bool:
    """Return whether an assistant turn begins at `at`, or ends before `at` in both conversations."""
    if at == len(messages):
        return False
    if messages[at].role == "assistant":
        return messages[at - 1].role != "assistant"
    return messages[at - 1].role == "assistant" and (at == len(others) or others[at].role != "assistant")


def turn_start(messages: Sequence[Message], end: int) -> int:
    """Return the index of the first message of the assistant turn that ends before index `end`; `end` if none does."""
    while end and messages[end - 1].role == "assistant":
        end -= 1
    return end


def _merge(run: Sequence[Message]) -> Message:
    """Return neighbouring assistant messages as one."""
    if len(run) == 1:
        return run[0]
    contents = [message.content for message in run if message.content]
    content: str | list[Json]
    if all(isinstance(item, str) for item in contents):
        content = "".join(str(item) for item in contents)
    else:
        content = []
        for item in contents:
            content += [{"type": "text", "text": item}] if isinstance(item, str) else item
    return Message(
        "assistant",
        content,
        "".join(message.reasoning for message in run if message.reasoning) or None,
        tool_calls=tuple(call for message in run for call in message.tool_calls),
    )


def _canonical_numbers(value: Any) -> Any:
    """Replace 1.0 by 1, and integers that JavaScript cannot hold by the numbers that JavaScript rounds them to."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _SAFE_INTEGER else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < _SAFE_INTEGER else float(value)
    if isinstance(value, list):
        return [_canonical_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical_numbers(item) for key, item in value.items()}
    return value
