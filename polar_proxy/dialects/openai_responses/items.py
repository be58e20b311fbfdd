"""Output items of the Responses dialect: their ids, and how an answer is written as items.

Every id leads back to its call: `resp_<t>` and `msg_<t>_<n>`, `rs_<t>_<n>`, `fc_<t>_<n>`, ... belong to `call_<t>`, and
n is the item's place in the answer. So a response can be found again by its id alone, and items that a client sends
back are known to be of one answer.

A custom tool's call whose arguments were not of the form `{"input": text}` hands out the argument string as it was. If
they do not even begin so, its id begins with `ctcraw`, so that it is read back as it was, too. A built-in tool's call
whose arguments its item cannot hold is handed out as a `function_call` with the argument string.

Reasoning goes out as a summary (an open model has nothing to hide) and, because many clients keep only that, as
`encrypted_content` too: opaque, not secret. It comes back from either.
"""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

from polar_proxy.dialects.openai_responses.custom_input import begins, custom_input
from polar_proxy.dialects.openai_responses.tools import Toolbox, built_in_item
from polar_proxy.dialects.wire import inflate
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, ToolCall

_RESPONSE_ID = re.compile(r"resp_([0-9A-Za-z]{1,64})")
_ITEM_ID = re.compile(r"[a-z]+_([0-9A-Za-z]{1,64})_[0-9]+")
_SEALED = "polar1."
_MOST = 64 << 20


def response_id(call_id: str) -> str:
    return "resp_" + call_id.removeprefix("call_")


def call_of_response(value: Any) -> str:
    """The call behind a response id. Raises RequestError as the provider does for one that it does not know."""
    found = _RESPONSE_ID.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise RequestError(
            f"Previous response with id {value!r:.80} not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return "call_" + found[1]


def item_id(prefix: str, call_id: str, place: int) -> str:
    return f"{prefix}_{call_id.removeprefix('call_')}_{place}"


def answer_of_item(value: Any) -> str | None:
    """What the ids of all items of one answer have in common; None for an id that is not from here."""
    found = _ITEM_ID.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


def seal(text: str) -> str:
    return _SEALED + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()


def unseal(value: Any) -> str | None:
    """The text in a value that `seal` made; None for any other."""
    if not isinstance(value, str) or not value.startswith(_SEALED):
        return None
    try:
        return inflate(base64.urlsafe_b64decode(value[len(_SEALED) :]), _MOST).decode()
    except ValueError:  # a broken copy
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


def call_item(tools: Toolbox, call: ToolCall, call_id: str, place: int, status: str) -> Json:
    """A tool call as the item of its kind of tool; a function call for a tool that nobody offered."""
    tool = tools.tools.get(call.name)
    kind = tool.kind if tool else "function"
    if tool is not None and kind == "custom":
        text = custom_input(call.arguments)
        item: Json = {
            "id": item_id("ctc" if begins(call.arguments) else "ctcraw", call_id, place),
            "type": "custom_tool_call",
            "status": status,
            "call_id": call.id,
            "name": tool.name,
            "input": call.arguments if text is None else text,
        }
    elif kind != "function" and (built_in := built_in_item(kind, call.arguments)) is not None:
        return {"id": item_id("bt", call_id, place), "call_id": call.id, "status": status, **built_in}
    else:
        item = {
            "id": item_id("fc", call_id, place),
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": tool.name if tool else call.name,
            "arguments": call.arguments,
        }
    if tool is not None and tool.namespace is not None:
        item["namespace"] = tool.namespace
    return item


def answer_items(answer: Json, call_id: str) -> list[Json]:
    """A recorded answer (an OpenAI assistant message) as input items.

    Calls are written as function calls by their offered names: how a call reads to the model does not depend on the
    kind of item that it went out as.
    """
    items: list[Json] = []
    if answer.get("reasoning_content"):
        items.append(reasoning_item(item_id("rs", call_id, len(items)), answer["reasoning_content"], "completed"))
    if answer.get("content") or not answer.get("tool_calls"):
        items.append(message_item(item_id("msg", call_id, len(items)), answer.get("content") or "", "completed", []))
    for raw in answer.get("tool_calls") or ():
        call = ToolCall(raw["id"], raw["function"]["name"], raw["function"]["arguments"])
        items.append(call_item(Toolbox(), call, call_id, len(items), "completed"))
    return items
