"""Completions bodies: prompts of every form, the API's defaults, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_proxy.dialects.base import ParsedRequest
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, TextRequest


def parse(**fields: Any) -> ParsedRequest:
    return OpenAICompletions().parse({"model": "m", "prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        ([5, 6], [(5, 6)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (list(range(1000)), [tuple(range(1000))]),
    ],
)
def test_prompts(prompt: object, expected: list[str | tuple[int, ...]]) -> None:
    """Each prompt of a list becomes a call."""
    parsed = parse(prompt=prompt)
    assert [request.prompt for request in parsed.requests if isinstance(request, TextRequest)] == expected
    kept = [json.loads(message) for (message,) in parsed.messages]
    assert [tuple(item) if isinstance(item, list) else item for item in kept] == expected


@pytest.mark.parametrize(("given", "expected"), [(None, 16), (3, 3), (0, 1)])
def test_max_tokens(given: int | None, expected: int) -> None:
    assert parse(max_tokens=given).requests[0].sampling.max_tokens == expected


@pytest.mark.parametrize(("given", "wants", "top"), [(None, False, 0), (0, True, 0), (5, True, 5)])
def test_logprobs_is_a_number(given: int | None, wants: bool, top: int) -> None:
    sampling = parse(logprobs=given).requests[0].sampling
    assert (sampling.logprobs, sampling.top_logprobs) == (wants, top)


def test_unknown_and_null_fields_are_tolerated() -> None:
    plain = parse()
    assert parse(user="me", x={"y": [1]}, suffix=None, echo=False, best_of=None, stop=None).requests == plain.requests
    assert parse(user="me").params == {"model": "m", "user": "me"}
    assert parse(n=2, best_of=2).requests[0].sampling.n == 2


WRONG: list[tuple[Json, str]] = [
    ({"model": None}, "model"),
    *(
        ({"prompt": value}, "prompt")
        for value in (None, 1, {}, [], [[]], [-1], [2**31], [True], ["a", 1], [1, "a"], [["a"]], ["a"] * 129)
    ),
    *(({"max_tokens": value}, "max_tokens") for value in (-1, "1", 0.5)),
    *(({"logprobs": value}, "logprobs") for value in (-1, 21, True, "1")),
    *(({"n": value}, "n") for value in (0, 129)),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "}"}, "suffix"),
    ({"temperature": 3}, "temperature"),
    ({"stop": [None]}, "stop"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{param}-{i}" for i, (_, param) in enumerate(WRONG)])
def test_error_names_the_wrong_field(fields: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_error_names_a_missing_prompt() -> None:
    with pytest.raises(RequestError) as caught:
        OpenAICompletions().parse({"model": "m"})
    assert (caught.value.param, caught.value.code) == ("prompt", "missing_required_parameter")
