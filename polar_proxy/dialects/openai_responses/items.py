"""Output items: their ids, and an answer written as items.

Every id contains the id of its call: `resp_<t>` and `msg_<t>_<n>`, `rs_<t>_<n>`, `fc_<t>_<n>`, ... belong to
`call_<t>`, where n is the item's position in the answer. So a response can be found by its id alone, and items that a
client sends back are recognised as parts of one answer.

If the arguments of a custom tool's call are not of the form `{"input": text}`, the item holds the argument string
itself. If they do not even begin that way, the item's id begins with `ctcraw`, so that the string is read back
unchanged. A call of a built-in tool whose arguments do not fit its item is sent as a `function_call`.

Reasoning is sent as a summary (an open model has nothing to hide), and also as `encrypted_content`, because many
clients keep only that. The encoding is opaque but not secret. Reasoning is read back from either field.
"""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

from polar_proxy.dialects.openai_responses.custom_input import begins_as_input, custom_input
from polar_proxy.dialects.openai_responses.tools import Toolbox, built_in_item
from polar_proxy.dialects.wire import decompress
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, Message, ToolCall

_RESPONSE_ID = re.compile(r"resp_([0-9A-Za-z]{1,64})")
_ITEM_ID = re.compile(r"[a-z]+_([0-9A-Za-z]{1,64})_[0-9]+")
_SEAL_PREFIX = "polar1."
_MAX_BYTES = 64 << 20


def response_id(call_id: str) -> str:
    return "resp_" + call_id.removeprefix("call_")


def call_id_of_response(value: Any) -> str:
    """Return the call id in a response id. Raises the provider's RequestError for a string that is not one."""
    found = _RESPONSE_ID.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise RequestError(
            f"Previous response with id {value!r:.80} not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return "call_" + found[1]


def item_id(prefix: str, call_id: str, position: int) -> str:
    return f"{prefix}_{call_id.removeprefix('call_')}_{position}"


def answer_of_item(value: Any) -> str | None:
    """Return the part that the ids of all items of one answer share; None for an id that Polar did not make."""
    found = _ITEM_ID.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


def seal(text: str) -> str:
    return _SEAL_PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def unseal(value: Any) -> str | None:
    """Return the text that `seal` encoded; None for any other value."""
    if not isinstance(value, str) or not value.startswith(_SEAL_PREFIX):
        return None
    try:
        return decompress(base64.urlsafe_b64decode(value[len(_SEAL_PREFIX) :]), _MAX_BYTES).decode()
    except ValueError:
        return None


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


def call_item(tools: Toolbox, call: ToolCall, call_id: str, position: int, status: str) -> Json:
    """Return a tool call as the item of its tool's kind; a function call for a tool that was not offered."""
    tool = tools.tools.get(call.name)
    kind = tool.kind if tool else "function"
    if tool is not None and kind == "custom":
        text = custom_input(call.arguments)
        item: Json = {
            "id": item_id("ctc" if begins_as_input(call.arguments) else "ctcraw", call_id, position),
            "type": "custom_tool_call",
            "status": status,
            "call_id": call.id,
            "name": tool.name,
            "input": call.arguments if text is None else text,
        }
    elif kind != "function" and (built_in := built_in_item(kind, call.arguments)) is not None:
        return {"id": item_id("bt", call_id, position), "call_id": call.id, "status": status, **built_in}
    else:
        item = {
            "id": item_id("fc", call_id, position),
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

    Calls become function calls with their offered names: the model reads a call the same, whatever kind of item the
    client received.
    """
    items: list[Json] = []
    if answer.reasoning:
        items.append(reasoning_item(item_id("rs", call_id, len(items)), answer.reasoning, "completed"))
    if answer.content or not answer.tool_calls:
        items.append(message_item(item_id("msg", call_id, len(items)), str(answer.content or ""), "completed", []))
    for call in answer.tool_calls:
        items.append(call_item(Toolbox(), call, call_id, len(items), "completed"))
    return items
