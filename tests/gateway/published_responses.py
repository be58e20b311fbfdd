"""Checks of response objects and events by the schema of Open Responses and the SDK's models."""

from __future__ import annotations

import re
from typing import Any

import orjson
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from polar_proxy.types import Json

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage", "store"),
    *("max_output_tokens", "max_tool_calls", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
"""https://github.com/openresponses/openresponses/blob/main/schema/components/schemas/ResponseResource.json"""


def check_response(value: Json) -> None:
    """Assert that a response object has all fields of the Open Responses schema, with values that the SDK allows."""
    Response.model_validate(value, strict=True)
    assert value.keys() >= _REQUIRED
    never_null = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "model", "metadata"}
    assert all(value[name] is not None for name in never_null)
    for tool in value["tools"]:
        assert tool["type"] != "function" or {"name", "description", "parameters", "strict"} <= tool.keys()


def checked_events(body: str) -> list[Json]:
    """Return the events of a stream over HTTP, after each was checked."""
    events = [orjson.loads(data) for data in re.findall("^data: (.*)$", body, re.MULTILINE)]
    for event in events:
        check_event(event)
    return events


def check_event(event: Json) -> None:
    """Assert that an event of a stream, and the response object in it, are as published."""
    _EVENTS.validate_python(event, strict=True)
    if "response" in event:
        check_response(event["response"])
