"""What Google clients do with the wire: reading streams, putting an answer back into the history."""

from __future__ import annotations

import json
from typing import Any

from polar_proxy.dialects import Answer
from polar_proxy.dialects.google import GoogleGenerateContent
from polar_proxy.types import ChatRequest, Json, SampleEvent

HI: Json = {"role": "user", "parts": [{"text": "hi"}]}
DECLARED: Json = {"functionDeclarations": [{"name": "bash"}, {"name": "python"}]}


def parse(body: Json) -> ChatRequest:
    (request,) = GoogleGenerateContent("m").parse(body).requests
    assert isinstance(request, ChatRequest)
    return request


def conversation(*contents: Json) -> list[Json]:
    """The canonical messages of these contents, without what is None."""
    return [message.to_openai() for message in parse({"contents": list(contents)}).messages]


def through(body: Json, events: list[SampleEvent], *, sse: bool = True) -> tuple[list[Json], Json]:
    """(the stream's chunks, the whole answer) for the same events."""
    dialect = GoogleGenerateContent("m", stream=True, sse=sse)
    parsed = dialect.parse(body)
    encoder = dialect.encoder(parsed, "call_1", 1)
    answer = Answer()
    written = b""
    for event in events:
        answer.add(event)
        written += encoder.feed(0, event)
    written += encoder.end([answer])
    whole = json.loads(dialect.encoder(parsed, "call_1", 1).respond([answer]))
    return decode(written, sse=sse), whole


def decode(written: bytes, *, sse: bool) -> list[Json]:
    if not sse:
        found: list[Json] = json.loads(written)
        return found
    lines = written.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def parts_of(chunks: list[Json], index: int = 0) -> list[Json]:
    """All parts of a candidate in order, as an SDK's chat keeps them."""
    return [
        part
        for chunk in chunks
        for candidate in chunk["candidates"]
        if candidate["index"] == index
        for part in candidate["content"]["parts"]
    ]


def glued(parts: list[Json]) -> list[Json]:
    """The parts as Gemini CLI keeps them: without thoughts, text glued to the text before it (which loses all else
    that the later piece carried), its own mark in front of each call id."""
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


def read(parts: list[Json]) -> Json:
    """What a client reads from parts."""
    calls: list[Any] = [part["functionCall"] for part in parts if "functionCall" in part]
    return {
        "text": "".join(part["text"] for part in parts if "text" in part and not part.get("thought")),
        "thoughts": "".join(part["text"] for part in parts if part.get("thought")),
        "calls": [(call.get("id"), call["name"], call["args"]) for call in calls],
    }
