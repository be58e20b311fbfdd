"""JSON for the database and for exports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_proxy.store import json_codec

SURROGATE = "\ud800"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"a": 1, "b": [1, {"c": None}], "d": "ü"},
        {"text": SURROGATE, "other": [SURROGATE]},
        {SURROGATE: 1},
    ],
)
def test_object_is_written_as_the_whole_is(fields: dict[str, Any]) -> None:
    assert json.loads(json_codec.dumps_object(fields)) == fields


def test_iterator_is_written_as_a_list_one_item_at_a_time() -> None:
    made = []

    def items() -> Any:
        for number in range(3):
            made.append(number)
            yield {"number": number, "text": SURROGATE}

    written = json_codec.dumps_object({"first": 0, "calls": items(), "none": iter(())})
    assert json.loads(written) == {
        "first": 0,
        "calls": [{"number": number, "text": SURROGATE} for number in range(3)],
        "none": [],
    }
    assert made == [0, 1, 2]
