"""A request in the format of Anthropic's Messages API. Source: https://docs.anthropic.com/en/api/messages

* System messages at the beginning are the field `system`. Later ones keep their place as messages of the role `system`.
* Results of tools and the user's messages after them are one message of the role `user`, results first.
* The thinking of a signed answer is sent as it came, and so is every other part that the client did not change.
  Reasoning without a signature is left out, because the API does not accept it.
* If the arguments of a tool call are not a JSON object, their text is sent as `{"arguments": text}`.
* Temperature, top_p and top_k are left out (and named by `not_carried`): API version 2026-10-21 refuses them at any
  value. Source: https://platform.claude.com/docs/en/api/migration-2026-10-21
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from polar_proxy.engines.base import enforced_format
from polar_proxy.engines.hosted.carried import passed_fields, refuse_sampling
from polar_proxy.engines.hosted.content import (
    TEXT_PARTS,
    add_to_turn,
    arguments_object,
    forced_tool,
    part_text,
    parts_of,
    read_media,
    schema_of,
    split_system,
    unsupported_part,
)
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, ClientOptions, Json, Message, ToolCall

_NOT_IN_ID = re.compile("[^a-zA-Z0-9_-]")
_THINKING = frozenset({"thinking", "redacted_thinking"})
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
LEAST_BUDGET = 1024
"""The smallest budget of thinking tokens that the API accepts."""


def anthropic_body(request: ChatRequest, model: str, max_tokens: int, *, stream: bool) -> Json:
    """Return the body. `max_tokens` is the limit if the client sets none.

    Raises RequestError for a request that Anthropic's format cannot express.
    """
    sampling = request.sampling
    refuse_sampling(sampling, "anthropic")
    body: Json = {
        **anthropic_prompt(request, model),
        "max_tokens": max_tokens if sampling.max_tokens is None else sampling.max_tokens,
        **passed_fields(request, "anthropic"),
    }
    if sampling.stop:
        body["stop_sequences"] = list(sampling.stop)
    if (response_format := enforced_format(request)) is not None:
        schema = schema_of(response_format)
        if schema is None:
            text = "'response_format' is not supported here without a schema: Anthropic has no plain JSON mode."
            raise RequestError(text, param="response_format", code="unsupported_parameter")
        body.setdefault("output_config", {})["format"] = {"type": "json_schema", "schema": schema}
    if stream:
        body["stream"] = True
    return body


def anthropic_prompt(request: ChatRequest, model: str) -> Json:
    """Return the fields of the body that determine the prompt. A request to count the prompt's tokens has the
    same fields."""
    leading, messages = split_system(request.messages)
    body: Json = {"model": model, "messages": _messages(messages)}
    if system := [block for message in leading for block in _input_blocks(message)]:
        body["system"] = system
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
        if request.tools_cache_control is not None:
            body["tools"][-1]["cache_control"] = request.tools_cache_control
        if (choice := _tool_choice(request)) is not None:
            body["tool_choice"] = choice
    if request.options is not None:
        body |= _reasoning(request.options)
    return body


def _messages(messages: Iterable[Message]) -> list[Json]:
    out: list[Json] = []
    for message in messages:
        role = {"assistant": "assistant", "system": "system", "developer": "system"}.get(message.role, "user")
        blocks = _assistant_blocks(message) if role == "assistant" else _input_blocks(message)
        add_to_turn(out, role, "content", blocks)
    return out


def _input_blocks(message: Message) -> list[Json]:
    parts = parts_of(message)
    marks = dict(message.cache_control)
    blocks = [_block(part, marks.get(number)) for number, part in enumerate(parts) if not _is_blank(part)]
    if message.role != "tool":
        return blocks
    # The mark of a result is on the result, not on a block inside of it.
    content = [{key: value for key, value in block.items() if key != "cache_control"} for block in blocks]
    result: Json = {"type": "tool_result", "tool_use_id": tool_id(message.tool_call_id or ""), "content": content}
    return [result | ({"cache_control": next(iter(marks.values()))} if marks else {})]


def _assistant_blocks(message: Message) -> list[Json]:
    texts = [part_text(part) for part in parts_of(message)]
    text = "".join(texts)
    calls = {tool_id(call.id): call for call in message.tool_calls}
    blocks: list[Json] = []
    turn = message.provider_turn
    if turn is not None and turn.provider == "anthropic":
        signed_text = "".join(block["text"] for block in turn.content if block["type"] == "text")
        for block in turn.content:
            if block["type"] in _THINKING:
                blocks.append(dict(block))
            elif block["type"] == "tool_use" and block["id"] in calls:
                blocks.append(_tool_use(calls.pop(block["id"])))
            elif block["type"] == "text" and signed_text == text:
                blocks.append(dict(block))
        if signed_text == text:
            text = ""
    if text.strip():
        # After the thinking, before the calls.
        place = sum(block["type"] in _THINKING for block in blocks)
        blocks.insert(place, {"type": "text", "text": text})
    blocks += [_tool_use(call) for call in calls.values()]
    if message.cache_control and blocks:
        blocks[-1]["cache_control"] = message.cache_control[-1][1]
    return blocks


def _tool_use(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": tool_id(call.id), "name": call.name, "input": arguments_object(call.arguments)}


def tool_id(call_id: str) -> str:
    """Return the id of a tool call, with `_` for each character that the API does not accept."""
    return _NOT_IN_ID.sub("_", call_id) or "_"


def _is_blank(part: Json) -> bool:
    return part.get("type") in TEXT_PARTS and not part_text(part).strip()


def _block(part: Json, mark: Json | None) -> Json:
    mark = mark or part.get("cache_control")
    block = {"type": "text", "text": part_text(part)} if part.get("type") in TEXT_PARTS else _media_block(part)
    return block if mark is None else {**block, "cache_control": mark}


def _media_block(part: Json) -> Json:
    media = read_media(part)
    source: Json = {"type": "url", "url": media.url}
    if not media.url:
        source = {"type": "base64", "media_type": media.mime, "data": media.data}
    if media.kind == "image" or media.mime.startswith("image/"):
        return {"type": "image", "source": source}
    title = {} if media.name is None else {"title": media.name}
    if media.kind == "file" and (media.url or media.mime == "application/pdf"):
        return {"type": "document", "source": source, **title}
    if media.kind == "file" and media.mime.startswith("text/"):
        text = {"type": "text", "media_type": "text/plain", "data": media.text()}
        return {"type": "document", "source": text, **title}
    raise unsupported_part(f"a {media.kind} of type {media.mime or 'unknown'!r:.80}")


def _tool(tool: Json) -> Json:
    function = tool["function"]
    out: Json = {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object"}}
    if function.get("description"):
        out["description"] = function["description"]
    if function.get("strict"):
        out["strict"] = True
    return out


def _tool_choice(request: ChatRequest) -> Json | None:
    choice, out = request.tool_choice, None
    if (name := forced_tool(choice)) is not None:
        out = {"type": "tool", "name": name}
    elif choice is not None:
        out = {"type": {"required": "any"}.get(str(choice), str(choice))}
    if request.parallel_tool_calls is False and choice != "none":
        return {**(out or {"type": "auto"}), "disable_parallel_tool_use": True}
    return out


def _reasoning(options: ClientOptions) -> Json:
    """Return the fields `thinking` and `output_config` for the client's reasoning options."""
    thinking: dict[str, Any] = {}
    tokens = 0 if options.effort == "none" else options.thinking_tokens
    if tokens == 0:
        return {"thinking": {"type": "disabled"}}
    if tokens is not None and tokens > 0:
        thinking = {"type": "enabled", "budget_tokens": max(LEAST_BUDGET, tokens)}
    elif options.show_reasoning:
        thinking = {"type": "adaptive", "display": "summarized"}
    elif tokens is not None:
        thinking = {"type": "adaptive"}
    out: Json = {"thinking": thinking} if thinking else {}
    if options.effort is not None and (effort := _EFFORTS.get(options.effort)) is not None:
        out["output_config"] = {"effort": effort}
    return out
