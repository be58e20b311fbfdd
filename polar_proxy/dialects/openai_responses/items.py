"""Output items: their ids, and an answer written as items.

Every id contains the id of the recorded call: `resp_<t>` and `msg_<t>_<n>`, `rs_<t>_<n>`, `fc_<t>_<n>`, ... belong to
`call_<t>`. So responses and items are found by their ids alone, and items that a client sends back are recognised as
parts of one answer. n counts the answer's items of that kind, from 0: the record has no order of text and tool calls,
so a position among all items could not be found again. The ids of input items are `in_<t>_<n>`, for message n of the
call's request; an item to which the client gave an id keeps that id.

The arguments of a custom tool's call should have the form `{"input": text}`; the item of the call then holds the text.
If the arguments have another form, the item holds the whole argument string. When a client sends an item back, Polar
takes its string for a whole argument string in two cases: the item's id begins with `ctcraw`, or the string begins with
`{"input": "` but is not complete JSON of this form. In all other cases, the string is the text. A call of a built-in
tool is sent as a `function_call` if the arguments do not fit into the tool's own item.

Reasoning is sent as a summary (an open model has nothing to hide), and also as `encrypted_content`, because many
clients keep only that. Reasoning is read back from either field.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from polar_proxy.dialects.custom_tools import begins_as_input, custom_input
from polar_proxy.dialects.openai_responses.tools import ResponsesTools, built_in_item
from polar_proxy.dialects.wire import seal
from polar_proxy.errors import RequestError
from polar_proxy.types import ConversationItem, Json, Message, ToolCall

_RESPONSE_ID = re.compile(r"resp_([0-9A-Za-z]{1,64})")
_ITEM_ID = re.compile(r"([a-z]{1,9})_([0-9A-Za-z]{1,64})_([0-9]{1,6})")
_INPUT = "in"
AnswerPart = tuple[str, str, int]
"""The part of a recorded call that an item id names: (call id, kind, number). The kind is `call` for a tool call,
otherwise the prefix of the item id. The number is 0 except for tool calls and input items."""
_CALL_PREFIXES = ("fc", "ctc", "ctcraw", "bt")


def response_id(call_id: str) -> str:
    return "resp_" + call_id.removeprefix("call_")


def call_id_of_response(value: Any) -> str | None:
    """Return the call id in a response id, or None if Polar did not make this id."""
    found = _RESPONSE_ID.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else "call_" + found[1]


def item_id(prefix: str, call_id: str, number: int) -> str:
    return f"{prefix}_{call_id.removeprefix('call_')}_{number}"


def input_item_id(call_id: str, position: int) -> str:
    return item_id(_INPUT, call_id, position)


class ItemId(NamedTuple):
    """An item id made by Polar, split into its parts."""

    prefix: str
    call_id: str
    number: int

    @classmethod
    def read(cls, value: Any) -> ItemId | None:
        found = _ITEM_ID.fullmatch(value) if isinstance(value, str) else None
        return None if found is None else cls(found[1], "call_" + found[2], int(found[3]))

    @property
    def is_input(self) -> bool:
        return self.prefix == _INPUT

    @property
    def part(self) -> AnswerPart:
        """The part of a recorded call that the id names.

        All texts of an answer are one part, because they are recorded as one text. All reasoning of an answer is one
        part, too.
        """
        kind = "call" if self.prefix in _CALL_PREFIXES else self.prefix
        return self.call_id, kind, self.number if kind in ("call", _INPUT) else 0


def answer_of_item(value: Any) -> str | None:
    """Return the id of the call that an item id belongs to. None if Polar did not make the id for an item of an
    answer."""
    found = ItemId.read(value)
    return None if found is None or found.is_input else found.call_id


def item_not_found(identity: str) -> RequestError:
    """Return OpenAI's error for an item that is in no stored response of the session."""
    text = (
        f"Item with id {identity!r:.80} not found. Items are not persisted when `store` is set to false. Try again with"
        " `store` set to true, or remove this item from your input."
    )
    return RequestError(text, status=404, param="input")


def duplicate_item(identity: str, param: str) -> RequestError:
    """Return the error for an item that has the same id as another item of the conversation or of the request."""
    text = f"Duplicate item found with id {identity!r:.80}. Send each item once; a conversation keeps its items."
    return RequestError(text, param=param)


def reasoning_item(identity: str, text: str, status: str) -> Json:
    return {
        "id": identity,
        "type": "reasoning",
        "status": status,
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": seal(text),
    }


def output_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(identity: str, text: str, status: str, logprobs: list[Json]) -> Json:
    return {
        "id": identity,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [output_text(text, logprobs)],
    }


def stored_item(item: Json, identity: str) -> ConversationItem:
    """Return the unchanged item together with its id. A conversation stores it in this form. `identity`: the id if the
    client gave the item none."""
    given = item.get("id")
    return ConversationItem(given if isinstance(given, str) and given else identity, item)


def listed_item(item: Json, identity: str) -> Json:
    """Return an input item as the API shows it. `identity`: the id if the client gave the item none."""
    listed = {"type": "message", "status": "completed", **{k: v for k, v in item.items() if v is not None}}
    listed["id"] = stored_item(item, identity).item_id
    if listed["type"] == "message":
        content = item.get("content")
        parts = [{"type": "text", "text": content or ""}] if isinstance(content, str | None) else content
        listed["content"] = [_listed_part(part, item.get("role") == "assistant") for part in parts or ()]
    return listed


def _listed_part(part: Json, of_assistant: bool) -> Json:
    kind = part["type"]
    if kind in ("text", "input_text", "output_text"):
        if of_assistant:
            return {**output_text(part["text"], []), **part, "type": "output_text"}
        return {**part, "type": "input_text"}
    return {"detail": "auto", **part} if kind == "input_image" else part


def call_item(tools: ResponsesTools, call: ToolCall, call_id: str, number: int, status: str) -> Json:
    """Return a tool call of an answer as an output item of the kind that belongs to the tool.

    The item is a `function_call` if the tool was not offered, or if the arguments do not fit a built-in tool's item.
    `number`: the position of the call among the answer's tool calls, from 0.
    """
    tool = tools.by_name.get(call.name)
    kind = tool.kind if tool else "function"
    if tool is not None and kind == "custom":
        text = custom_input(call.arguments)
        item: Json = {
            "id": item_id("ctc" if begins_as_input(call.arguments) else "ctcraw", call_id, number),
            "type": "custom_tool_call",
            "status": status,
            "call_id": call.id,
            "name": tool.name,
            "input": call.arguments if text is None else text,
        }
    elif kind != "function" and (built_in := built_in_item(kind, call.arguments)) is not None:
        return {"id": item_id("bt", call_id, number), "call_id": call.id, "status": status, **built_in}
    else:
        item = {
            "id": item_id("fc", call_id, number),
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": tool.name if tool else call.name,
            "arguments": call.arguments,
        }
    if tool is not None and tool.namespace is not None:
        item["namespace"] = tool.namespace
    return item


def answer_items(answer: Message, call_id: str) -> list[Json]:
    """Return a recorded answer as input items.

    Every tool call becomes a `function_call`. Its name is the name under which the tool was offered to the engine. The
    client may have received another kind of item, but the model reads all kinds the same.
    """
    items: list[Json] = []
    if answer.reasoning:
        items.append(reasoning_item(item_id("rs", call_id, 0), answer.reasoning, "completed"))
    if answer.content or not answer.tool_calls:
        items.append(message_item(item_id("msg", call_id, 0), str(answer.content or ""), "completed", []))
    for number, call in enumerate(answer.tool_calls):
        items.append(call_item(ResponsesTools(), call, call_id, number, "completed"))
    return items


def parts_of_answer(answer: Message, call_id: str) -> dict[AnswerPart, Json]:
    """Return the items of a recorded answer (`answer_items`) by `ItemId.part`."""
    items = answer_items(answer, call_id)
    return {named.part: item for item in items if (named := ItemId.read(item["id"])) is not None}
