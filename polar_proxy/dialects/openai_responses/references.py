"""References of a body to recorded calls, written out before the body is parsed.

`previous_response_id` names a response: its conversation and its answer come before the body's own input.
`conversation` names a conversation: its items come before the body's own input. A body cannot have both fields. An item
of the input may name another item by its id (`{"type": "item_reference", "id": ...}`, where the type is optional). The
reference is replaced by the item. Such a reference may name an item of an answer, an input item as the API lists it, or
an item of the conversation.

Promises: an item that the input already has, in full or by an earlier reference, is not repeated. A reference to one
text of an answer gives the answer's whole text, because the record joins the texts; the same holds for reasoning. The
model reads a referenced item as it reads the item itself. If a body continues a response or a conversation, and
contains a tool output whose call is nowhere in the whole input, the body is refused, because it continues the wrong
response or conversation. (A body that continues neither may have such outputs: agents that shorten their history send
them.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from polar_proxy.dialects.base import ReferencedCall, References
from polar_proxy.dialects.fields import invalid, invalid_type
from polar_proxy.dialects.openai_responses.input import input_items, is_reference
from polar_proxy.dialects.openai_responses.items import (
    AnswerPart,
    ItemId,
    answer_items,
    call_id_of_response,
    duplicate_item,
    item_not_found,
    parts_of_answer,
)
from polar_proxy.errors import RequestError
from polar_proxy.types import ConversationItem, Json

_ReferencedCalls = Mapping[str, ReferencedCall]


def referenced_conversation(body: Json) -> str | None:
    """Return the id of the conversation that a body continues and adds to; None if the body names none. Raises
    RequestError for a malformed id, or if the body also has `previous_response_id`."""
    value = body.get("conversation")
    if value is None:
        return None
    if body.get("previous_response_id") is not None:
        problem = "it cannot be combined with 'conversation'; send only one of the two"
        raise invalid("previous_response_id", problem)
    identity = value.get("id") if isinstance(value, dict) else value
    if not isinstance(identity, str):
        raise invalid_type("conversation", "the id of a conversation, or an object with its 'id'")
    return identity


def find_references(body: Json) -> References:
    """Return the ids of the calls that a body refers to.

    Raises RequestError for a reference whose id contains no call id. If the body names a conversation, an item's id
    need not contain a call id, because the client may have chosen the ids of items in the conversation.
    """
    items = input_items(body.get("input"))
    calls: set[str] = set()
    answers: set[str] = set()
    if (previous := body.get("previous_response_id")) is not None:
        call_id = call_id_of_response(previous)
        if call_id is None:
            raise _previous_not_found(previous)
        calls.add(call_id)
    references = {item["id"] for item in items if is_reference(item)}
    if references:
        references -= _ids_given_in_full(items)
    for identity in references:
        named = ItemId.read(identity)
        if named is not None:
            (calls if named.is_input else answers).add(named.call_id)
        elif body.get("conversation") is None:  # which may have an item with an id of the client's own
            raise item_not_found(identity)
    return References(frozenset(calls), frozenset(answers - calls))


def write_out_references(body: Json, calls: _ReferencedCalls, conversation: Sequence[ConversationItem] = ()) -> Json:
    """Return a body with its references replaced by the items that they name.

    `conversation`: the items of the conversation that the body names. Raises RequestError if an item is missing or
    given twice, or if a tool output has no call.
    """
    items = input_items(body.get("input"))
    if (previous := body.get("previous_response_id")) is not None:
        items = [*_conversation(previous, calls), *items]
    stored, own = {entry.item_id for entry in conversation}, _ids_given_in_full(items)
    if twice := stored & own:
        raise duplicate_item(min(twice), "input")
    ids = stored | own
    parts = {named.part for identity in ids if (named := ItemId.read(identity)) is not None}
    answers: dict[str, dict[AnswerPart, Json]] = {}
    whole = [entry.item for entry in conversation]
    for item in items:
        if not is_reference(item):
            whole.append(item)
            continue
        identity = item["id"]
        named = ItemId.read(identity)
        if identity in ids or (named is not None and named.part in parts):
            continue
        call = None if named is None else calls.get(named.call_id)
        if named is None or call is None or call.problem is not None:
            raise item_not_found(identity)
        if named.call_id not in answers:
            answer = call.answer
            answers[named.call_id] = {} if answer is None else parts_of_answer(answer, named.call_id)
        found = _input_item(call, named.number) if named.is_input else answers[named.call_id].get(named.part)
        if found is None:
            raise item_not_found(identity)
        parts.add(named.part)
        whole.append({**found, "id": identity})
    if previous is not None or body.get("conversation") is not None:
        _check_outputs(input_items(body.get("input")), whole)
    return {**body, "input": whole}


def _check_outputs(own: list[Json], whole: list[Json]) -> None:
    """Raise RequestError if a tool output among the body's own items belongs to no call of the whole input."""
    calls = [item for item in whole if not _is_output(item)]
    known = {call[key] for call in calls for key in ("call_id", "id") if isinstance(call.get(key), str)}
    for position, item in enumerate(own):
        if _is_output(item):
            identity = item.get("call_id", item.get("id") if item["type"] == "local_shell_call_output" else None)
            if isinstance(identity, str) and identity not in known:
                problem = f"the conversation that is continued has no tool call {identity!r:.80}"
                raise invalid(f"input[{position}]", problem, code="tool_call_not_found")


def _is_output(item: Json) -> bool:
    return str(item.get("type")).endswith("_output")


def _ids_given_in_full(items: list[Json]) -> set[str]:
    """Return the ids of the items that are not references."""
    return {item["id"] for item in items if isinstance(item.get("id"), str) and not is_reference(item)}


def _conversation(previous: Any, calls: _ReferencedCalls) -> list[Json]:
    """Return the items of a previous response: its input without its instructions, and its answer."""
    call_id = call_id_of_response(previous)
    call = None if call_id is None else calls.get(call_id)
    if call_id is None or call is None:
        raise _previous_not_found(previous)
    if call.problem is not None:
        raise _previous_not_found(previous, f"It ended early ({call.problem}), so it cannot be continued.")
    before = [orjson.loads(message) for message in call.messages]
    answer = [] if call.answer is None else answer_items(call.answer, call_id)
    return [*(item for item in before if item.get("type") != "instructions"), *answer]


def _previous_not_found(previous: Any, reason: str = "") -> RequestError:
    return RequestError(
        f"Previous response with id {previous!r:.80} not found. {reason}".rstrip(),
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _input_item(call: ReferencedCall, position: int) -> Json | None:
    if position >= len(call.messages):
        return None
    item: Json = orjson.loads(call.messages[position])
    return None if item.get("type") == "instructions" or is_reference(item) else item
