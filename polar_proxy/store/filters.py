"""Conditions on rollouts as users type them: `reward>=1, harness=mini-swe-agent, status=done`.

The name of a harness matches all its versions: `harness=codex` matches every version of codex, and
`harness=codex@1.2.3` only version 1.2.3.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, not_, or_, select

from polar_proxy.errors import UsageError
from polar_proxy.store.schema import rollouts, sessions, tasks

_NUMBERS: dict[str, ColumnElement[Any]] = {
    "reward": rollouts.c.reward,
    "rating": rollouts.c.rating,
    "seed": rollouts.c.seed,
    "exit_code": rollouts.c.exit_code,
    "calls": func.coalesce(sessions.c.calls, 0),
    "prompt_tokens": func.coalesce(sessions.c.prompt_tokens, 0),
    "completion_tokens": func.coalesce(sessions.c.completion_tokens, 0),
    "price_usd": sessions.c.price_usd,
    "created_at": rollouts.c.created_at,
}
_TEXTS: dict[str, ColumnElement[Any]] = {
    name: rollouts.c[name]
    for name in (
        *("rollout_id", "group_id", "task_id", "session_id", "status"),
        *("harness", "sandbox", "engine", "model", "job_id", "cause", "policy_version", "label"),
    )
}
_FLAGS: dict[str, ColumnElement[Any]] = {name: rollouts.c[name] for name in ("masked", "incomplete")}
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_VERSIONED = ("harness", "engine")
"""Columns whose values are a name and, after a space, a version. A condition without a version matches all versions."""
_CONDITION = re.compile(r"(\w+)\s*(>=|<=|!=|==|=|>|<)\s*(.+)")
_LONGEST = 4096

rollouts_with_sessions = rollouts.outerjoin(sessions, sessions.c.session_id == rollouts.c.session_id)
"""The tables to which the SQL of conditions refers."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: its text, the field that it compares, and its SQL."""

    text: str
    name: str
    clause: ColumnElement[bool]


def select_rollouts(text: str) -> Select[Any]:
    """Select the ids of the rollouts that meet conditions (see `parse_where`)."""
    return select(rollouts.c.rollout_id).select_from(rollouts_with_sessions).where(*parse_where(text))


def parse_where(text: str) -> list[ColumnElement[bool]]:
    """Return the SQL of conditions joined by `,` or `and`. Raises UsageError for anything else."""
    return [condition.clause for condition in parse_conditions(text)]


def parse_conditions(text: str) -> list[Condition]:
    """Parse conditions joined by `,` or `and`, in time linear in the text. Raises UsageError for anything else."""
    if len(text) > _LONGEST:
        raise UsageError(f"The conditions have {len(text)} characters; at most {_LONGEST} are allowed.")
    return [_condition(part) for part in map(str.strip, re.split(r",|\band\b", text)) if part]


def is_number(name: str) -> bool:
    """Return whether a field is compared as a number."""
    return name in _NUMBERS


def column_of(name: str) -> ColumnElement[Any]:
    """Return the column of a field that `parse_conditions` accepts."""
    return tasks.c.family if name == "family" else {**_NUMBERS, **_TEXTS, **_FLAGS}[name]


def _condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a condition. Write NAME OPERATOR VALUE. Operators: {' '.join(_OPERATORS)}")
    name, sign, value = match.groups()
    return Condition(text, name, _clause(name, sign, value.strip("'\"")))


def _clause(name: str, sign: str, value: str) -> ColumnElement[bool]:
    compare = _OPERATORS[sign]
    if name in _NUMBERS:
        try:
            number = float(value)
        except ValueError:
            raise UsageError(f"{name} must be compared with a number, not with {value!r}") from None
        return compare(_NUMBERS[name], number)  # type: ignore[no-any-return]
    if name in _FLAGS:
        if sign not in ("=", "==", "!=") or value.lower() not in _BOOLEANS:
            raise UsageError(f"{name} must be compared with true or false. Write {name}=true or {name}=false")
        return _FLAGS[name].is_(_BOOLEANS[value.lower()] is not (sign == "!="))
    if name == "family":
        return rollouts.c.task_id.in_(select(tasks.c.task_id).where(compare(tasks.c.family, value)))
    if name not in _TEXTS:
        known = ", ".join(sorted([*_NUMBERS, *_TEXTS, *_FLAGS, "family"]))
        raise UsageError(f"Rollouts have no field {name!r}. Fields: {known}")
    column = _TEXTS[name]
    if name == "harness":  # in options its version follows an @
        value = value.replace("@", " ", 1)
    if name in _VERSIONED and sign in ("=", "==", "!=") and " " not in value:
        same = or_(column == value, column.startswith(f"{value} ", autoescape=True))
        return not_(same) if sign == "!=" else same
    if sign == "!=":
        return or_(column != value, column.is_(None))
    return compare(column, value)  # type: ignore[no-any-return]
