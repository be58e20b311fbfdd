"""Anthropic's messages as Polar's messages: the texts that the model reads, in the order in which the model reads them.

* A user message with tool results becomes one `tool` message for each result, in order, and then one `user` message
  with the rest.
* An assistant message becomes one message: its texts joined without a separator (as they were sampled), its thinking
  as `reasoning`, and its tool calls. Consecutive assistant messages are one turn, as the API defines it. The result of
  a tool that a server ran lies inside the assistant's turn, and becomes a `tool` message in the middle of the turn.
* A message with the role `system` keeps its place.
* Content that is a single text becomes a string, whether it came as a string or as a block: Claude Code alternates
  between the two. Citations and other annotations that no model reads are dropped; `cache_control` is kept in a
  separate field of the message.
* The text of a tool error gets the prefix `Error: `, unless it already begins with the word "error".
* An image or a file becomes OpenAI's content part, which the engine accepts or refuses. Unknown blocks are shown to
  the model as JSON. Everything that the API itself renders is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

from polar_proxy.dialects.anthropic.tools import AnthropicTools, parse_tool_addition, render_definitions
from polar_proxy.dialects.base import AssistantDraft
from polar_proxy.dialects.fields import (
    as_content,
    invalid,
    invalid_type,
    optional_string,
    string_field,
    text_part,
)
from polar_proxy.dialects.wire import to_json, unseal
from polar_proxy.types import Json, Message, ToolCall

_NOT_RENDERED = frozenset({"fallback", "mcp_tool_listing", "container_upload"})
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})


def parse_messages(raw: list[Any], tools: AnthropicTools) -> list[Message]:
    messages: list[Message] = []
    for position, item in enumerate(raw):
        path = f"messages[{position}]"
        if not isinstance(item, dict):
            raise invalid_type(path, "an object")
        role = item.get("role")
        blocks = _content_blocks(item.get("content"), f"{path}.content")
        reader = _BlockReader(tools, f"{path}.content")
        if role == "assistant":
            _append_turn(messages, reader.assistant(blocks))
        elif role in ("user", "system"):
            messages += reader.input(str(role), blocks)
        else:
            raise invalid(f"{path}.role", "expected user, assistant or system")
    return messages


def parse_system(value: Any, tools: AnthropicTools) -> Message | None:
    """Return the field `system`, a string or text blocks, as the first message."""
    blocks = _content_blocks(value, "system")
    if not blocks:
        return None
    (message,) = _BlockReader(tools, "system").input("system", blocks)
    return message


def _content_blocks(value: Any, path: str) -> list[Json]:
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [text_part(value)]
    if not isinstance(value, list):
        raise invalid_type(path, "a string or an array of content blocks")
    for number, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"{path}[{number}]", "expected a content block with a type")
    return value


def _append_turn(messages: list[Message], turn: list[Message]) -> None:
    """Append an assistant's turn to `messages`. If the last of `messages` and the first of `turn` are both assistant
    messages, merge these two."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and turn and turn[0].role == "assistant":
        merged = AssistantDraft()
        for message in (last, turn[0]):
            merged.text.append(str(message.content or ""))
            merged.reasoning.append(message.reasoning or "")
            merged.tool_calls += message.tool_calls
        messages[-1] = merged.message
        turn = turn[1:]
    messages += turn


class _BlockReader:
    """Reads the content blocks of one message. `path`: the content's place in the body, for error messages."""

    def __init__(self, tools: AnthropicTools, path: str) -> None:
        self._tools = tools
        self._path = path

    def input(self, role: str, blocks: list[Json]) -> list[Message]:
        """Convert the blocks of a user or system message to messages: one for each tool result, then one for the other
        blocks."""
        results: list[Message] = []
        rest: list[tuple[Json, str]] = []
        for block, path in _rendered(blocks, self._path):
            if block["type"] == "tool_result" and role == "user":
                results.append(self._result(block, path))
            else:
                rest.append((block, path))
        parts, marks = self._marked_parts(rest)
        if parts or not results:
            results.append(Message(role, as_content(parts), cache_control=marks))
        return results

    def assistant(self, blocks: list[Json]) -> list[Message]:
        messages: list[Message] = []
        draft = AssistantDraft()
        for block, path in _rendered(blocks, self._path):
            kind = block["type"]
            if kind == "thinking":
                draft.reasoning.append(_thinking(block))
            elif kind == "redacted_thinking":
                draft.reasoning.append(unseal(string_field(block, "data", path)) or "")
            elif kind in _CALLS:
                draft.tool_calls.append(_tool_call(block, path))
            elif kind.endswith("_tool_result") and isinstance(block.get("tool_use_id"), str):
                messages += [] if draft.empty else [draft.message]
                messages.append(self._result(block, path))
                draft = AssistantDraft()
            else:
                draft.text += [_as_text(part) for part in self._parts([(block, path)])]
        if not draft.empty or not messages:
            mark = _cache_mark(blocks[-1]) if blocks else None
            messages.append(replace(draft.message, cache_control=() if mark is None else ((0, mark),)))
        return messages

    def _result(self, block: Json, path: str) -> Message:
        content = block.get("content")
        if isinstance(content, dict):  # the result of a tool that a server ran is a single object
            references = content.get("tool_references")
            content = references if isinstance(references, list) else [content]
        parts = self._nested(content, f"{path}.content")
        if block.get("is_error"):
            parts = _marked_as_error(parts)
        mark = _cache_mark(block)
        return Message(
            "tool",
            as_content(parts),
            tool_call_id=string_field(block, "tool_use_id", path),
            cache_control=() if mark is None else ((max(0, len(parts) - 1), mark),),
        )

    def _nested(self, content: Any, path: str) -> list[Json]:
        return self._parts(_rendered(_content_blocks(content, path), path))

    def _marked_parts(self, blocks: list[tuple[Json, str]]) -> tuple[list[Json], tuple[tuple[int, Json], ...]]:
        """Return the content parts of the blocks, and a pair (index of a part, `cache_control`) for each block that has
        a `cache_control`. By such a pair, the client asks to cache the prompt up to the end of the part."""
        if not any("cache_control" in block for block, _ in blocks):
            return self._parts(blocks), ()
        parts: list[Json] = []
        marks: list[tuple[int, Json]] = []
        for block, path in blocks:
            parts += self._parts([(block, path)])
            if (mark := _cache_mark(block)) is not None and parts:
                marks.append((len(parts) - 1, mark))
        return parts, tuple(marks)

    def _parts(self, blocks: list[tuple[Json, str]]) -> list[Json]:
        """Return blocks as OpenAI content parts. Consecutive references to tools become one part, the tools'
        definitions."""
        parts: list[Json] = []
        for references, row in groupby(blocks, key=lambda item: item[0]["type"] == "tool_reference"):
            if references:
                parts += self._references(list(row))
                continue
            for block, path in row:
                read = _BLOCK_READERS.get(block["type"])
                parts += read(self, block, path) if read is not None else [_unknown(block, path)]
        return parts

    def _references(self, blocks: list[tuple[Json, str]]) -> list[Json]:
        names = [string_field(block, "tool_name", path) for block, path in blocks]
        found = [self._tools.by_name[name] for name in names if name in self._tools.by_name]
        texts = [render_definitions(found)] if found else []
        texts += [f"Tool {name} is not available." for name in names if name not in self._tools.by_name]
        return [text_part("\n".join(texts))]

    def _plain_text(self, block: Json, path: str) -> list[Json]:
        return [text_part(string_field(block, "text", path))]

    def _compaction(self, block: Json, path: str) -> list[Json]:
        return [text_part(block["content"])] if isinstance(block.get("content"), str) else []

    def _image(self, block: Json, path: str) -> list[Json]:
        url = _source_url(_source(block, path), path, "expected base64 or url; uploaded files are not kept here")
        return [{"type": "image_url", "image_url": {"url": url}}]

    def _document(self, block: Json, path: str) -> list[Json]:
        source = _source(block, path)
        about = [f"{key}: {block[key]}" for key in ("title", "context") if isinstance(block.get(key), str)]
        head = [text_part("\n".join(about))] if about else []
        if source.get("type") == "text":
            return [*head, text_part(string_field(source, "data", path))]
        if source.get("type") == "content":
            return [*head, *self._nested(source.get("content"), f"{path}.source.content")]
        data = _source_url(source, path, "expected text, content, base64 or url; uploaded files are not kept here")
        return [*head, {"type": "file", "file": {"file_data": data}}]

    def _search_result(self, block: Json, path: str) -> list[Json]:
        head = "\n".join(str(block[key]) for key in ("title", "source") if isinstance(block.get(key), str))
        return [*([text_part(head)] if head else []), *self._nested(block.get("content"), f"{path}.content")]

    def _tool_addition(self, block: Json, path: str) -> list[Json]:
        tool = parse_tool_addition(block.get("tool"), self._tools, f"{path}.tool")
        return [] if tool is None else [text_part(render_definitions([tool]))]

    def _tool_removal(self, block: Json, path: str) -> list[Json]:
        tool = block.get("tool")
        name = optional_string(tool, "name") if isinstance(tool, dict) else None
        return [] if name is None else [text_part(f"The tool {name} is no longer available.")]


_BLOCK_READERS: dict[str, Callable[[_BlockReader, Json, str], list[Json]]] = {
    "text": _BlockReader._plain_text,
    "image": _BlockReader._image,
    "document": _BlockReader._document,
    "search_result": _BlockReader._search_result,
    "tool_addition": _BlockReader._tool_addition,
    "tool_removal": _BlockReader._tool_removal,
    "compaction": _BlockReader._compaction,
}


def _rendered(blocks: list[Json], path: str) -> list[tuple[Json, str]]:
    """Return the blocks that Anthropic's API would show to the model, each with its path."""
    return [(block, f"{path}[{number}]") for number, block in enumerate(blocks) if block["type"] not in _NOT_RENDERED]


def _cache_mark(block: Json) -> Json | None:
    mark = block.get("cache_control")
    return mark if isinstance(mark, dict) else None


def _thinking(block: Json) -> str:
    """Return the thinking text; read it from the signature if the block has no text (display `omitted`)."""
    return optional_string(block, "thinking") or unseal(block.get("signature")) or ""


def _tool_call(block: Json, path: str) -> ToolCall:
    value = block.get("input")
    if not isinstance(value, dict | None):
        raise invalid(f"{path}.input", "expected an object")
    arguments = to_json(value or {}, f"{path}.input").decode()
    return ToolCall(optional_string(block, "id") or "", string_field(block, "name", path), arguments)


def _marked_as_error(parts: list[Json]) -> list[Json]:
    first = parts[0]["text"] if parts and parts[0]["type"] == "text" else None
    if first is None:
        return [text_part("Error"), *parts]
    if first.lstrip()[:5].lower() == "error":
        return parts
    return [text_part(f"Error: {first}"), *parts[1:]]


def _unknown(block: Json, path: str) -> Json:
    return text_part(to_json({key: value for key, value in block.items() if key != "cache_control"}, path).decode())


def _as_text(part: Json) -> str:
    """Return a part of an assistant message as text: engines accept only text there."""
    return str(part["text"]) if part["type"] == "text" else to_json(part, "messages").decode()


def _source(block: Json, path: str) -> Json:
    source = block.get("source")
    if not isinstance(source, dict):
        raise invalid_type(f"{path}.source", "an object")
    return source


def _source_url(source: Json, path: str, expected: str) -> str:
    """Return the URL of an image or document; base64 data becomes a data URL. `expected`: the error text if the source
    is neither a URL nor base64 data."""
    if source.get("type") == "base64":
        return f"data:{string_field(source, 'media_type', path)};base64,{string_field(source, 'data', path)}"
    if source.get("type") == "url":
        return string_field(source, "url", path)
    raise invalid(f"{path}.source", expected)
