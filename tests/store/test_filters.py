"""Conditions on rollouts: what is accepted, and that hostile text costs nothing."""

from __future__ import annotations

import time

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store.filters import parse_where


@pytest.mark.parametrize(
    ("text", "conditions"),
    [("", 0), (" , and ,", 0), ("reward >= 1 , harness = codex", 2), ("seed=1 and status!=done", 2)],
)
def test_reads_conditions(text: str, conditions: int) -> None:
    assert len(parse_where(text)) == conditions


@pytest.mark.parametrize("text", ["reward", "reward >", "=1", "reward ~ 1", "x" * 4000, "reward" + " " * 4000 + "1"])
def test_rejects_what_is_no_condition_at_once(text: str) -> None:
    start = time.process_time()
    with pytest.raises(UsageError, match="is not a condition"):
        parse_where(text)
    assert time.process_time() - start < 0.5


def test_rejects_very_long_text() -> None:
    with pytest.raises(UsageError, match="at most 4096"):
        parse_where("reward=1" + " " * 60_000 + "and reward=1")
