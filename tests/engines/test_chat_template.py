"""The sandbox of chat templates gives the same results as Jinja's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jinja2.exceptions import SecurityError
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
    "m['items'] is defined",
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
    jinja = ImmutableSandboxedEnvironment().from_string(source)
    assert _result(
        lambda: ModelTemplate(source).render(ChatRequest("", (Message("user", " hi "),)), MessageForm())
    ) == (_result(lambda: jinja.render(messages=[{"role": "user", "content": " hi "}])))


def _result(render: Callable[[], str]) -> str:
    """Return the rendering, or the sandbox's error."""
    try:
        return render()
    except RequestError as error:
        return str(error.__cause__)
    except SecurityError as error:
        return str(error)
