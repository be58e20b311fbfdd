"""The sandbox of chat templates gives the same results as Jinja's."""

from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polar_proxy.engines.chat_template import MessageForm, ModelTemplate
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Message

EXPRESSIONS = [
    "m.role",
    "m.nothing is defined",
    "m.nothing",
    "m.items is defined",
    "m.items() | list",
    "m['items']",
    "m.content.strip()",
    "m.content.__class__",
    "m._private",
    "m.__class__",
    "m.pop('role')",
    "'{0}'.format(m.content)",
    "[1].append(2)",
    "namespace(a=1).a",
    "(m.content.upper)()",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_lookups_are_those_of_jinjas_sandbox(expression: str) -> None:
    source = "{% set m = messages[0] %}{{ " + expression + " }} again {{ " + expression + " }}"
    request = ChatRequest("", (Message("user", " hi "),))
    try:
        message = {"role": "user", "content": " hi "}
        expected = ImmutableSandboxedEnvironment().from_string(source).render(messages=[message])
    except Exception as error:  # noqa: BLE001  Jinja's errors have many types
        with pytest.raises(RequestError) as caught:
            ModelTemplate(source).render(request, MessageForm())
        assert str(error) in str(caught.value)
    else:
        assert ModelTemplate(source).render(request, MessageForm()) == expected
