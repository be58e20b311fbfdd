"""Lists of items in pages, and the parameters in the URL of a list (OpenAI Responses and Conversations)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple
from urllib.parse import parse_qs

import orjson

from polar_proxy.dialects.fields import invalid
from polar_proxy.gateway.http import asgi
from polar_proxy.types import Json

_INCLUDABLE = frozenset(
    {
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
        "reasoning.encrypted_content",
    }
)
"""Values of `include` that are accepted and change nothing: Polar always shows these fields, or never has them."""
_MOST_LISTED, _LISTED = 100, 20

Query = Mapping[str, list[str]]
"""The parameters of a URL."""


class PageRequest(NamedTuple):
    limit: int
    order: Literal["asc", "desc"]
    after: str | None
    """The id of the item before the page."""

    @classmethod
    def read(cls, query: Query) -> PageRequest:
        """Read the parameters of a list request. Raises RequestError if a parameter is invalid."""
        check_include(query)
        order = last_value(query, "order") or "desc"
        if order not in ("asc", "desc"):
            raise invalid("order", "expected asc or desc")
        limit = integer_value(query, "limit", 1, _MOST_LISTED) or _LISTED
        return cls(limit, "asc" if order == "asc" else "desc", last_value(query, "after"))


def list_object(items: Sequence[Json], *, has_more: bool) -> bytes:
    """Return the body of a page of items. `first_id` and `last_id` of an empty page are empty strings, because the
    API's schema allows no null there."""
    listed = {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }
    return orjson.dumps(listed)


def read_query(scope: asgi.Scope) -> Query:
    return parse_qs(scope["query_string"].decode("latin-1"))


def check_include(query: Query) -> None:
    """Raise RequestError if `include` names a field that cannot be shown."""
    for name in (*query.get("include", ()), *query.get("include[]", ())):
        if name == "message.output_text.logprobs":
            raise invalid("include", "the record has no texts of single tokens, so no log-probabilities can be shown")
        if name not in _INCLUDABLE:
            raise invalid("include", f"{name!r:.80} is not known")


def last_value(query: Query, name: str) -> str | None:
    return query[name][-1] if name in query else None


def integer_value(query: Query, name: str, least: int, most: int | None) -> int | None:
    """Return an integer parameter; None if it is missing. Raises RequestError if its value is no integer or out of
    bounds."""
    value = last_value(query, name)
    if value is None:
        return None
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    number = int(value) if re.fullmatch("[0-9]{1,9}", value) else -1
    if number < least or (most is not None and number > most):
        raise invalid(name, f"expected an integer {bounds}")
    return number


def flag(query: Query, name: str) -> bool:
    """Return a boolean parameter; False if it is missing. Raises RequestError for values besides `true` and `false`."""
    value = last_value(query, name)
    if value not in (None, "true", "false"):
        raise invalid(name, "expected true or false")
    return value == "true"
