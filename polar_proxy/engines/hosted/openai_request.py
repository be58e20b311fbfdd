"""A request in the format of OpenAI's Chat Completions. Source: https://platform.openai.com/docs/api-reference/chat

* Messages are sent without the fields that the API does not document: reasoning (unless the API was found to need it)
  and the name of the tool in a tool's result.
* A tool's result may hold only text. Its images follow in a user message after all results.
"""

from __future__ import annotations

from collections.abc import Iterable

from polar_proxy.engines.hosted.carried import passed_fields
from polar_proxy.engines.hosted.content import TEXT_PARTS, read_media, unsupported_part
from polar_proxy.types import ChatRequest, ClientOptions, Json, Message

_FORMATS = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}


def chat_fields(request: ChatRequest, *, reasoning: bool, official: bool) -> Json:
    """Return the request's messages, its tools with their settings, its response format and its options.

    `reasoning`: keep the reasoning of earlier answers in the messages. `official`: the API is OpenAI's own. It
    gets the client's options as well, and content parts only in their documented form.
    """
    body: Json = {"messages": _messages(request.messages, reasoning, official)}
    if request.tools:
        body["tools"] = list(request.tools)
        for name in ("tool_choice", "parallel_tool_calls"):
            if (value := getattr(request, name)) is not None:
                body[name] = value
    if request.response_format is not None:
        body["response_format"] = request.response_format
    if official and request.options is not None:
        body |= passed_fields(request, "openai")
        if (effort := reasoning_effort(request.options)) is not None:
            body["reasoning_effort"] = effort
    return body


def reasoning_effort(options: ClientOptions) -> str | None:
    """Return the reasoning effort that the client asked for, in OpenAI's terms (`max` is `xhigh`).

    If the client set a limit of reasoning tokens instead, return the effort closest to this limit. Returns None if the
    client set neither, or a negative limit.
    """
    tokens = options.thinking_tokens
    if options.effort is not None:
        return "xhigh" if options.effort == "max" else options.effort
    if tokens is None or tokens < 0:
        return None
    return "none" if tokens == 0 else "low" if tokens <= 2048 else "medium" if tokens <= 8192 else "high"


def _messages(messages: Iterable[Message], reasoning: bool, official: bool) -> list[Json]:
    out: list[Json] = []
    media: list[Json] = []
    for message in messages:
        written = message.to_openai()
        if not reasoning:
            written.pop("reasoning_content", None)
        if message.role == "tool":
            written.pop("name", None)
            if message.has_images and isinstance(message.content, list):
                media += [part for part in message.content if part.get("type") not in TEXT_PARTS]
                written["content"] = [part for part in message.content if part.get("type") in TEXT_PARTS]
        elif media:
            out.append({"role": "user", "content": media})
            media = []
        out.append(written)
    if media:
        out.append({"role": "user", "content": media})
    if official:
        for written in out:
            if isinstance(written["content"], list):
                written["content"] = [_documented_part(part) for part in written["content"]]
    return out


def _documented_part(part: Json) -> Json:
    kind = part.get("type")
    if kind in ("text", "image_url", "input_audio", "refusal"):
        return part
    media = read_media(part)
    if media.kind == "image":
        return {"type": "image_url", "image_url": {"url": media.url or f"data:{media.mime};base64,{media.data}"}}
    if media.kind == "audio" and media.mime in _FORMATS and media.data:
        return {"type": "input_audio", "input_audio": {"data": media.data, "format": _FORMATS[media.mime]}}
    if media.kind == "file" and media.data:
        data = f"data:{media.mime};base64,{media.data}"
        return {"type": "file", "file": {"file_data": data, "filename": media.name or "file"}}
    raise unsupported_part(f"a {media.kind} {'by its URL' if media.url else f'of type {media.mime!r:.80}'}")
