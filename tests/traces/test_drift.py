"""The definition of drift: one test for each clause."""

from __future__ import annotations

from typing import Any

import pytest

from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.drift import INTENTIONAL_REASONS, DriftEvent, drift_events
from polar_proxy.types import CallRecord
from tests.factories import call

BASE = {"base_call_id": "a", "base_choice": 0}


def second(prompt: list[int] | None, **changes: Any) -> CallRecord:
    return call("b", 1, prompt, [7], **{"prompt_reason": "off", **BASE, **changes})


FIRST = call("a", 0, [1, 2], [3, 4])


@pytest.mark.parametrize(
    ("prompt", "expected_event"),
    [
        ([1, 2, 3, 9, 5], (3, 4, 9)),
        ([1, 9, 3, 4, 5], (1, 2, 9)),
        ([9, 2, 3, 4, 5], (0, 1, 9)),
        ([1, 2, 3], (3, 4, None)),
        ([1], (1, 2, None)),
        ([], (0, 1, None)),
    ],
)
def test_event_has_the_first_different_token(prompt: list[int], expected_event: tuple[int, int, int | None]) -> None:
    (event,) = drift_events([FIRST, second(prompt)])
    position, expected, actual = expected_event
    assert event == DriftEvent(
        call_id="b",
        base_call_id="a",
        base_choice=0,
        position=position,
        expected=expected,
        actual=actual,
        prompt_reason="off",
    )


@pytest.mark.parametrize(
    "calls",
    [
        [FIRST, second([1, 2, 3, 4, 5])],
        [FIRST, second([1, 2, 3, 4])],
        [FIRST, second([9], base_call_id=None)],
        [FIRST, second([9], base_call_id="z")],
        [FIRST, second(None)],
        [call("a", 0, None, [3, 4]), second([9])],
        [call("a", 0, [1, 2], [3, 4], status="client_gone"), second([9])],
        [call("a", 0, [1, 2], [3, 4], edge="side_call"), second([9])],
        [FIRST, second([9], base_choice=3)],
        *([FIRST, second([9], prompt_reason=reason)] for reason in sorted(INTENTIONAL_REASONS)),
    ],
)
def test_calls_without_drift(calls: list[CallRecord]) -> None:
    assert drift_events(calls) == ()


@pytest.mark.parametrize("reason", [None, "off", "images", "stop_sequence", "aborted", "engine_cannot"])
def test_unintended_differences_are_drift(reason: str | None) -> None:
    assert [found.prompt_reason for found in drift_events([FIRST, second([9], prompt_reason=reason)])] == [reason]


def test_drift_is_relative_to_the_continued_choice() -> None:
    first = call("a", 0, [1], [2], [3])
    assert drift_events([first, second([1, 3, 4], base_choice=1)]) == ()
    (found,) = drift_events([first, second([1, 2, 4], base_choice=1)])
    assert (found.base_choice, found.position, found.expected, found.actual) == (1, 1, 3, 2)


@pytest.mark.parametrize("builder", BUILDERS)
def test_builders_report_drift_events(builder: str) -> None:
    assert [found.outcome for found in build([FIRST, second([9])], builder).drift_events] == ["split"]
    assert [found.outcome for found in build([FIRST, second([9], status="client_gone")], builder).drift_events] == [
        "excluded"
    ]
