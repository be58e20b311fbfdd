"""Anthropic's messages as canonical messages: what the model reads, in the order in which it reads it.

* A user message with tool results becomes one `tool` message for each result, in the order given, and then one `user`
  message with the rest.
* An assistant message becomes one message: its texts in a row (with nothing between, as they were sampled), its
  thinking as `reasoning`, its calls. Assistant messages that follow each other are one turn, as the API defines it. The
  result of a tool that a server ran stands inside the assistant's turn; it becomes a `tool` message in its middle.
* `role: "system"` inside the messages stays where it stands.
* Content that is one text is a string, whether it came as a string or as a block: Claude Code flips between the two.
  `cache_control`, citations and other marks that no model reads are not taken over.
* An error of a tool is said in its text: `Error: ` stands in front, unless the text says it already.
* An image or a file becomes OpenAI's content part, for the engine to take or refuse. Of blocks that are not known here
  the model reads the JSON; nothing is dropped but what the API itself does not render.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from polar_proxy.dialects.anthropic.signature import unseal
from polar_proxy.dialects.anthropic.tools import AnthropicTools, parse_tool_addition, render_definitions
from polar_proxy.dialects.base import to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, Message, ToolCall

_NOT_RENDERED = frozenset({"fallback", "mcp_tool_listing", "container_upload"})
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})


def parse_messages(raw: list[Any], tools: AnthropicTools) -> list[Message]:
    """Raises RequestError that names the place of what is wrong."""
    out: list[Message] = []
    for position, item in enumerate(raw):
        where = f"messages[{position}]"
        if not isinstance(item, dict):
            raise RequestError(f"Invalid type for '{where}': expected an object.", param=where, code="invalid_type")
        role = item.get("role")
        blocks = content_blocks(item.get("content"), f"{where}.content")
        reader = _BlockReader(tools, f"{where}.content")
        if role == "assistant":
            _extend(out, reader.assistant(blocks))
        elif role in ("user", "system"):
            out += reader.told(str(role), blocks)
        else:
            raise RequestError(
                f"Invalid value for '{where}.role': expected user, assistant or system.",
                param=f"{where}.role",
                code="invalid_value",
            )
    return out


def parse_system(value: Any, tools: AnthropicTools) -> Message | None:
    """The `system` field, a string or text blocks, as the first message."""
    blocks = content_blocks(value, "system")
    if not blocks:
        return None
    (message,) = _BlockReader(tools, "system").told("system", blocks)
    return message


def content_blocks(value: Any, path: str) -> list[Json]:
    """Content as blocks, whichever of its two forms it has. An empty text is no block."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise RequestError(
            f"Invalid type for '{path}': expected a string or an array of content blocks.",
            param=path,
            code="invalid_type",
        )
    for number, block in enumerate(value):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _bad(f"{path}[{number}]", "expected a content block with a type")
    return value


def flat(parts: list[Json]) -> str | list[Json]:
    """Content parts in their simplest form."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _extend(out: list[Message], turn: list[Message]) -> None:
    """Append an assistant's turn, which goes on with the one before if that was an assistant's too."""
    last = out[-1] if out else None
    if last is not None and last.role == "assistant" and turn and turn[0].role == "assistant":
        draft = _AssistantDraft()
        for message in (last, turn[0]):
            draft.texts.append(str(message.content or ""))
            draft.reasoning += [message.reasoning] if message.reasoning else []
            draft.calls += message.tool_calls
        out[-1:] = draft.message()
        turn = turn[1:]
    out += turn


@dataclass(slots=True)
class _AssistantDraft:
    """An assistant's message in the making."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> list[Message]:
        text, reasoning = "".join(self.texts), "".join(self.reasoning)
        content = text if text or not self.calls else None
        return [Message("assistant", content, reasoning or None, tuple(self.calls))]

    def __bool__(self) -> bool:
        return bool(self.texts or self.reasoning or self.calls)


class _BlockReader:
    """Reads the blocks of one message. `path` is where they stand in the body, for errors."""

    def __init__(self, tools: AnthropicTools, path: str) -> None:
        self._tools = tools
        self._path = path

    def told(self, role: str, blocks: list[Json]) -> list[Message]:
        """What is said to the model: results first, then the rest."""
        results: list[Message] = []
        rest: list[tuple[Json, str]] = []
        for block, path in _each(blocks, self._path):
            if block["type"] == "tool_result" and role == "user":
                results.append(self._result(block, path))
            else:
                rest.append((block, path))
        parts = self._parts(rest)
        if parts or not results:
            results.append(Message(role, flat(parts)))
        return results

    def assistant(self, blocks: list[Json]) -> list[Message]:
        out: list[Message] = []
        draft = _AssistantDraft()
        for block, path in _each(blocks, self._path):
            kind = block["type"]
            if kind == "thinking":
                draft.reasoning.append(_thinking(block, path))
            elif kind == "redacted_thinking":
                draft.reasoning.append(unseal(_string(block, "data", path)) or "")
            elif kind in _CALLS:
                draft.calls.append(_call(block, path))
            elif kind.endswith("_tool_result") and isinstance(block.get("tool_use_id"), str):
                out += draft.message() if draft else []
                out.append(self._result(block, path))
                draft = _AssistantDraft()
            else:
                draft.texts += [_shown(part) for part in self._parts([(block, path)])]
        if draft or not out:
            out += draft.message()
        return out

    def _result(self, block: Json, path: str) -> Message:
        content = block.get("content")
        if isinstance(content, dict):  # what a server's tool answered: one object
            references = content.get("tool_references")
            content = references if isinstance(references, list) else [content]
        parts = self._inner(content, f"{path}.content")
        if block.get("is_error"):
            parts = _as_error(parts)
        return Message("tool", flat(parts), tool_call_id=_string(block, "tool_use_id", path))

    def _inner(self, content: Any, path: str) -> list[Json]:
        return self._parts(_each(content_blocks(content, path), path))

    def _parts(self, blocks: list[tuple[Json, str]]) -> list[Json]:
        """Blocks as OpenAI content parts. References to tools that stand in a row are one list of definitions."""
        out: list[Json] = []
        for references, row in groupby(blocks, key=lambda item: item[0]["type"] == "tool_reference"):
            if references:
                out += self._references(list(row))
                continue
            for block, path in row:
                reader = _BLOCKS.get(block["type"])
                out += reader(self, block, path) if reader is not None else [_text(_unknown(block, path))]
        return out

    def _references(self, blocks: list[tuple[Json, str]]) -> list[Json]:
        names = [_string(block, "tool_name", path) for block, path in blocks]
        found = [self._tools.by_name[name] for name in names if name in self._tools.by_name]
        texts = [render_definitions(found)] if found else []
        texts += [f"Tool {name} is not available." for name in names if name not in self._tools.by_name]
        return [_text("\n".join(texts))]

    def _plain(self, block: Json, path: str) -> list[Json]:
        return [_text(_string(block, "text", path))]

    def _summary(self, block: Json, path: str) -> list[Json]:
        return [_text(block["content"])] if isinstance(block.get("content"), str) else []

    def _image(self, block: Json, path: str) -> list[Json]:
        source = _source(block, path)
        if source.get("type") == "base64":
            url = f"data:{_string(source, 'media_type', path)};base64,{_string(source, 'data', path)}"
        elif source.get("type") == "url":
            url = _string(source, "url", path)
        else:
            raise _bad(f"{path}.source", "an image comes as base64 or url; no files are kept here")
        return [{"type": "image_url", "image_url": {"url": url}}]

    def _document(self, block: Json, path: str) -> list[Json]:
        source = _source(block, path)
        about = [f"{key}: {block[key]}" for key in ("title", "context") if isinstance(block.get(key), str)]
        head = [_text("\n".join(about))] if about else []
        match source.get("type"):
            case "text":
                return [*head, _text(_string(source, "data", path))]
            case "content":
                return [*head, *self._inner(source.get("content"), f"{path}.source.content")]
            case "base64":
                data = f"data:{_string(source, 'media_type', path)};base64,{_string(source, 'data', path)}"
            case "url":
                data = _string(source, "url", path)
            case _:
                raise _bad(f"{path}.source", "a document comes as text, content, base64 or url; no files are kept here")
        return [*head, {"type": "file", "file": {"file_data": data}}]

    def _search_result(self, block: Json, path: str) -> list[Json]:
        head = "\n".join(str(block[key]) for key in ("title", "source") if isinstance(block.get(key), str))
        return [*([_text(head)] if head else []), *self._inner(block.get("content"), f"{path}.content")]

    def _addition(self, block: Json, path: str) -> list[Json]:
        tool = parse_tool_addition(block.get("tool"), self._tools, f"{path}.tool")
        return [] if tool is None else [_text(render_definitions([tool]))]

    def _removal(self, block: Json, path: str) -> list[Json]:
        tool = block.get("tool")
        name = tool.get("name") if isinstance(tool, dict) else None
        return [_text(f"The tool {name} is no longer available.")] if isinstance(name, str) else []


_BLOCKS: dict[str, Callable[[_BlockReader, Json, str], list[Json]]] = {
    "text": _BlockReader._plain,
    "image": _BlockReader._image,
    "document": _BlockReader._document,
    "search_result": _BlockReader._search_result,
    "tool_addition": _BlockReader._addition,
    "tool_removal": _BlockReader._removal,
    "compaction": _BlockReader._summary,
}


def _thinking(block: Json, path: str) -> str:
    """The text as it came; of a block that came back without it (display `omitted`), what its signature keeps."""
    text = block.get("thinking")
    if isinstance(text, str) and text:
        return text
    signature = block.get("signature")
    return (unseal(signature) or "") if isinstance(signature, str) else ""


def _call(block: Json, path: str) -> ToolCall:
    value = block.get("input")
    if not isinstance(value, dict | None):
        raise _bad(f"{path}.input", "expected an object")
    call_id = block.get("id")
    arguments = to_json(value or {}, f"{path}.input").decode()
    return ToolCall(call_id if isinstance(call_id, str) else "", _string(block, "name", path), arguments)


def _as_error(parts: list[Json]) -> list[Json]:
    first = parts[0]["text"] if parts and parts[0]["type"] == "text" else None
    if first is None:
        return [_text("Error"), *parts]
    if first.lstrip()[:5].lower() == "error":
        return parts
    return [_text(f"Error: {first}"), *parts[1:]]


def _each(blocks: list[Json], path: str) -> list[tuple[Json, str]]:
    """The blocks that are rendered, each with its place."""
    return [(block, f"{path}[{number}]") for number, block in enumerate(blocks) if block["type"] not in _NOT_RENDERED]


def _unknown(block: Json, path: str) -> str:
    return to_json({key: value for key, value in block.items() if key != "cache_control"}, path).decode()


def _shown(part: Json) -> str:
    """A part inside an assistant's text, which no engine takes but as text."""
    return str(part["text"]) if part["type"] == "text" else to_json(part, "messages").decode()


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _source(block: Json, path: str) -> Json:
    source = block.get("source")
    if not isinstance(source, dict):
        raise _bad(f"{path}.source", "expected an object")
    return source


def _string(block: Json, key: str, path: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise _bad(f"{path}.{key}", "expected a string")
    return value


def _bad(path: str, what: str) -> RequestError:
    return RequestError(f"Invalid '{path}': {what}.", param=path, code="invalid_value")
