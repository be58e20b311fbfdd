"""`fast_fields.replace` does what `dataclasses.replace` does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polar_proxy.fast_fields import replace
from polar_proxy.types import ChatRequest, ClientOptions, Message, Sampling, TextRequest

_CHAT = ChatRequest("m", (Message("user", "hi"),), Sampling(stop=("x",)), options=ClientOptions("openai_chat"))


def _values(value: Any) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (_CHAT, {"model": "n", "large": True}),
        (_CHAT, {}),
        (TextRequest("m", (1, 2)), {"prompt": "text"}),
        (Sampling(seed=1), {"temperature": 0.5, "n": 2}),
    ],
)
def test_replaces_as_dataclasses_do(value: Any, changes: dict[str, object]) -> None:
    changed = replace(value, **changes)
    assert type(changed) is type(value)
    assert _values(changed) == _values(dataclasses.replace(value, **changes))


def test_refuses_an_unknown_field() -> None:
    with pytest.raises(TypeError, match="colour"):
        replace(Sampling(), colour="red")
