"""The use of a session's budget: what counts, when it is spent, and what stays after a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.rollout_spec import RolloutSpec, SessionBudget
from polar_proxy.sessions.budget import BudgetUsage, Reservation
from polar_proxy.store.repositories.sessions import SessionSummary

NEW = SessionSummary("sess_1", None, "open", None, 0.0, None, None, None, 0, 0, 0, 0, None, None, None)


def usage(**limits: object) -> BudgetUsage:
    return BudgetUsage(SessionBudget.model_validate(limits).as_policy())


def make_call(budget: BudgetUsage, *, now: float = 100.0) -> Reservation:
    """Make a call of ten prompt tokens and five sampled ones, for a quarter of a dollar."""
    with budget.reserve(1, now) as reservation:
        if reservation.refusal is None:
            reservation.count(10, 5, now, 0.25)
        return reservation


def test_a_session_without_limits_is_never_spent() -> None:
    budget = usage()
    assert not any(make_call(budget).refusal for _ in range(50))
    assert RolloutSpec().session_policy().keys().isdisjoint(SessionBudget.model_fields)


@pytest.mark.parametrize(
    ("limits", "answered"),
    [
        ({"max_calls": 3}, 3),
        ({"max_sampled_tokens": 11}, 3),
        ({"max_sampled_tokens": 10}, 2),
        ({"max_prompt_tokens": 15}, 2),
        ({"max_price_usd": 0.6}, 3),
        ({"max_price_usd": 0.25}, 1),
        ({"max_calls": 4, "max_prompt_tokens": 100, "max_sampled_tokens": 5}, 1),
    ],
)
def test_refuses_calls_after_a_limit(limits: dict[str, float], answered: int) -> None:
    budget = usage(**limits)
    refused = [make_call(budget).refusal for _ in range(answered + 5)]
    assert [error is None for error in refused] == [True] * answered + [False] * 5
    assert str(limits[budget.spent or ""]) in str(refused[-1])


@given(st.integers(1, 8), st.lists(st.sampled_from(["begin", "end", "fail"]), max_size=60), st.integers(1, 2))
def test_concurrent_calls_never_exceed_the_number_of_calls(most: int, steps: list[str], size: int) -> None:
    budget = usage(max_calls=most)
    running: list[Reservation] = []
    begun = 0
    for step in steps:
        if step == "begin":
            reservation = budget.reserve(size, 1.0)
            if reservation.refusal is None:
                running.append(reservation.__enter__())
                begun += size
        elif running:
            reservation = running.pop(0)
            if step == "end":
                for _ in range(size):
                    reservation.count(1, 1, 1.0)
            else:  # it failed before it became a call, so its place is free again
                begun -= size
            reservation.__exit__(None, None, None)
        assert begun <= most
    if budget.spent is None and begun + size <= most:
        assert budget.reserve(size, 1.0).refusal is None


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 20))
def test_tokens_exceed_the_limit_by_the_calls_in_flight_at_most(most: int, parallel: int, each: int) -> None:
    budget = usage(max_sampled_tokens=most)
    sampled = 0
    while True:
        round_of = [budget.reserve(1, 1.0) for _ in range(parallel)]
        if round_of[0].refusal is not None:
            break
        for reservation in round_of:
            with reservation:
                reservation.count(1, each, 1.0)
            sampled += each
    assert most <= sampled < most + parallel * each


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 6))
def test_a_restart_changes_nothing(steps: list[bool], most: int) -> None:
    budget, answered, row = usage(max_calls=most), 0, NEW
    for restart in steps:
        if restart:
            budget = usage(max_calls=most)
            budget.load(row)
        reservation = make_call(budget)
        if reservation.refusal is None:
            answered += 1
            tokens = {"prompt_tokens": 10 * answered, "completion_tokens": 5 * answered}
            row = replace(NEW, calls=answered, last_call_at=100.0, **tokens)
        row = replace(row, spent=budget.spent)
    assert answered == min(len(steps), most)


def test_a_stale_row_takes_nothing_back() -> None:
    budget = usage(max_calls=2)
    make_call(budget)
    budget.load(NEW)
    make_call(budget)
    budget.load(replace(NEW, calls=1))
    assert make_call(budget).refusal is not None


def test_an_idle_session_is_spent_and_a_busy_one_is_not() -> None:
    budget = usage(max_idle_seconds=10)
    assert make_call(budget, now=1000.0).refusal is None  # the time before the first call does not count
    assert make_call(budget, now=1009.0).refusal is None
    with budget.reserve(1, 1015.0):
        assert make_call(budget, now=1900.0).refusal is None  # a call is in flight
        assert not budget.spend_if_idle(5000.0, since=0.0)


def test_spends_the_budget_of_an_idle_session() -> None:
    budget = usage(max_idle_seconds=10)
    assert not budget.spend_if_idle(109.0, since=100.0)
    make_call(budget, now=112.0)
    assert not budget.spend_if_idle(121.0, since=100.0)
    assert make_call(budget, now=123.0).refusal is not None
    assert budget.spent == "max_idle_seconds"


def test_final_answers_end_in_refusals() -> None:
    budget = usage(max_calls=1, at_budget="stop")
    make_call(budget)
    after = [budget.reserve(1, 1.0) for _ in range(12)]
    assert all("not from the model" in (one.final_answer or "") and one.refusal is None for one in after[:10])
    assert all(one.refusal is not None for one in after[10:])
