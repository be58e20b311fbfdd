"""The client side of Google's API: reading streams, and sending an answer back."""

from __future__ import annotations

import json
from typing import Any

from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.types import ChatRequest, Json, SampleEvent
from tests.dialects.encoding import encode

HI: Json = {"role": "user", "parts": [{"text": "hi"}]}
DECLARED: Json = {"functionDeclarations": [{"name": "bash"}, {"name": "python"}]}


def parse(body: Json) -> ChatRequest:
    (request,) = GoogleGenerateContent("m").parse(body).requests
    assert isinstance(request, ChatRequest)
    return request


def conversation(*contents: Json) -> list[Json]:
    """Return these contents parsed as messages in OpenAI's form."""
    return [message.to_openai() for message in parse({"contents": list(contents)}).messages]


def both_forms(body: Json, events: list[SampleEvent], *, sse: bool = True) -> tuple[list[Json], Json]:
    """Return (the chunks of the stream, the response)."""
    encoded = encode(GoogleGenerateContent("m", stream=True, sse=sse), body, events)
    return decode(encoded.stream, sse=sse), encoded.response


def decode(written: bytes, *, sse: bool) -> list[Json]:
    if not sse:
        found: list[Json] = json.loads(written)
        return found
    lines = written.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def parts_of(chunks: list[Json], index: int = 0) -> list[Json]:
    """Return all parts of a candidate in order, as an SDK's chat stores them."""
    return [
        part
        for chunk in chunks
        for candidate in chunk["candidates"]
        if candidate["index"] == index
        for part in candidate["content"]["parts"]
    ]


def gemini_cli_history(parts: list[Json]) -> list[Json]:
    """Return the parts as Gemini CLI stores them.

    It drops thoughts, appends text to the text before it (losing the other fields of the later part), and puts the
    function's name before each call id.
    """
    kept: list[Json] = []
    for part in parts:
        if part.get("thought"):
            continue
        if kept and kept[-1].get("text") and "text" in part:
            kept[-1] = {**kept[-1], "text": kept[-1]["text"] + part["text"]}
        elif "functionCall" in part:
            call = part["functionCall"]
            kept.append({**part, "functionCall": {**call, "id": f"{call['name']}__{call['id']}"}})
        else:
            kept.append(part)
    return kept


def read_parts(parts: list[Json]) -> Json:
    """Return the text, thoughts and calls in parts."""
    calls: list[Any] = [part["functionCall"] for part in parts if "functionCall" in part]
    return {
        "text": "".join(part["text"] for part in parts if "text" in part and not part.get("thought")),
        "thoughts": "".join(part["text"] for part in parts if part.get("thought")),
        "calls": [(call.get("id"), call["name"], call["args"]) for call in calls],
    }
