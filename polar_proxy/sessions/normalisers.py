"""Normalisers: differences between messages that are ignored when they are compared. Data, with a name and a reason.

They decide only whether two messages mean the same. The request reaches the model and the store unchanged. Each can be
switched off by its name (`gateway.normalisers_off`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polar_proxy.errors import UsageError


@dataclass(frozen=True, slots=True)
class Normaliser:
    """A difference to ignore. One without a `pattern` is implemented in `hashing.py`, by its name."""

    name: str
    reason: str
    seen: str
    """The harness and version in which it was observed."""
    roles: frozenset[str] = frozenset()
    guard: str = ""
    """A text without this string has nothing to replace. It is found faster than the pattern."""
    pattern: re.Pattern[str] | None = None
    replacement: str = ""


_OPENING = frozenset({"system", "user"})

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
        "json_arguments",
        "Arguments come back parsed and serialised again: other spacing, key order and number forms.",
        "Qwen Code 0.24.4, Pi 0.87.1, opencode 1.18.33, Cline 3.0.65, Claude Code 2.1.329",
    ),
    Normaliser(
        "trailing_space",
        "Trailing white space of an answer is stripped when it comes back.",
        "aider 0.86.2",
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
        re.compile(r"x-anthropic-billing-header:[^\n]*?(?:cch=[^;\n]*;|\n|$)\n?"),
    ),
    Normaliser(
        "gemini_session_context",
        "The block with date and directory listing is regenerated when a session is resumed.",
        "Gemini CLI 0.61.0",
        frozenset({"user"}),
        "<session_context>",
        re.compile(r"<session_context>.*?</session_context>", re.DOTALL),
        "<session_context/>",
    ),
    Normaliser(
        "aider_rules_reminder",
        "The reminder of the edit format is appended to the newest user message only.",
        "aider 0.86.2",
        frozenset({"user"}),
        "# *SEARCH/REPLACE block* Rules:",
        re.compile(r"\s*# \*SEARCH/REPLACE block\* Rules:\n.*", re.DOTALL),
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

NAMES = frozenset(item.name for item in NORMALISERS)


class ActiveNormalisers:
    """The normalisers that are switched on."""

    def __init__(self, off: Iterable[str] = ()) -> None:
        off = frozenset(off)
        if unknown := off - NAMES:
            raise UsageError(
                f"gateway.normalisers_off names unknown normalisers: {', '.join(sorted(unknown))}. "
                f"The known ones are {', '.join(sorted(NAMES))}."
            )
        self.names = NAMES - off
        self._texts: Sequence[tuple[frozenset[str], str, re.Pattern[str], str]] = [
            (item.roles, item.guard, item.pattern, item.replacement)
            for item in NORMALISERS
            if item.name in self.names and item.pattern is not None
        ]

    def text(self, role: str, text: str) -> str:
        """Return the text of a message as it is compared."""
        for roles, guard, pattern, replacement in self._texts:
            if role in roles and guard in text:
                text = pattern.sub(replacement, text)
        return text
