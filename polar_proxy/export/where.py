"""The selection language of `--where`: comparisons joined by `and`, such as `reward>=1 and harness=mini-swe-agent`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polar_proxy.errors import UsageError

FIELDS = (
    "rollout_id",
    "session_id",
    "group_id",
    "task_id",
    "status",
    "reward",
    "harness",
    "sandbox",
    "engine",
    "model",
    "seed",
    "calls",
    "prompt_tokens",
    "completion_tokens",
    "exit_code",
)
_TERM = re.compile(r"^\s*([a-z_]+)\s*(>=|<=|!=|==|=|>|<)\s*(.+?)\s*$")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True)
class _Term:
    field: str
    compare: str
    value: str | float | None

    def accepts(self, row: Any) -> bool:
        have = getattr(row, self.field, None)
        if self.value is None or have is None:
            # null equals only null, and is neither above nor below anything
            same = have is None and self.value is None
            return same if self.compare in ("=", "==") else (not same if self.compare == "!=" else False)
        if isinstance(self.value, float) != isinstance(have, (int, float)):
            return _OPERATORS[self.compare](str(have), str(self.value)) if self.compare in ("=", "==", "!=") else False
        return _OPERATORS[self.compare](have, self.value)


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed selection; `accepts(row)` reads the row's attributes."""

    terms: tuple[_Term, ...]

    def accepts(self, row: Any) -> bool:
        return all(term.accepts(row) for term in self.terms)


def parse_where(texts: list[str]) -> Where:
    """Parse and join expressions. Raises UsageError that names what was not understood."""
    terms = []
    for text in texts:
        for part in re.split(r"\s+and\s+|,", text):
            match = _TERM.match(part)
            if match is None:
                raise UsageError(f"--where: cannot read {part!r}. Write for example 'reward>=1 and status=done'.")
            name, compare, value = match.groups()
            if name not in FIELDS:
                raise UsageError(f"--where: there is no field {name!r}. There are: {', '.join(FIELDS)}.")
            terms.append(_Term(name, compare, _value(value)))
    return Where(tuple(terms))


def _value(text: str) -> str | float | None:
    if text.lower() in ("null", "none"):
        return None
    try:
        return float(text)
    except ValueError:
        return text.strip("'\"")
