"""Input items of the Responses API as Polar's messages.

An answer comes back as several items (reasoning, message, one for each tool call); they become one assistant message
again, as it was recorded. Items with ids from Polar belong together if their ids name the same answer. Other items
belong together unless a message of another role or a tool output lies between them. Text or reasoning directly after
text begins another answer.

Every item that holds something for the model to read is kept. These are ignored: web search calls (no engine here made
them), lists of MCP tools, reasoning that another provider encrypted, items of unknown type without content, and
references to items that are in the input (other references were replaced before, see `references`). Any other item that
cannot be shown to the model raises RequestError with the item's path `input[i]`.

System and developer messages at the beginning become one system message that starts with `instructions`, because chat
templates of open models have no developer role and accept only one system message at the beginning. Later ones become
one system message each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from polar_proxy.dialects.base import AssistantDraft
from polar_proxy.dialects.custom_tools import custom_arguments
from polar_proxy.dialects.fields import (
    as_content,
    invalid,
    invalid_type,
    optional_string,
    string_field,
    text_part,
)
from polar_proxy.dialects.openai_responses.items import answer_of_item, item_not_found
from polar_proxy.dialects.openai_responses.tools import BUILT_IN_TOOLS, ResponsesTools, built_in_arguments
from polar_proxy.dialects.wire import to_json, unseal
from polar_proxy.types import Json, Message, ToolCall

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_TEXT_PARTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}
_IGNORED = {"web_search_call", "mcp_list_tools", "additional_tools", "item_reference"}
_CONTENT_FIELDS = (
    *("content", "encrypted_content", "output", "outputs", "input", "text", "arguments", "result", "results"),
    *("action", "actions", "operation", "code", "queries", "tools", "summary", "error"),
)
_BUILT_IN_CALLS = {tool.item: name for name, tool in BUILT_IN_TOOLS.items()}


def collect_tools(tools: ResponsesTools, items: list[Json]) -> None:
    """Add the tools in items of type `additional_tools` and `tool_search_output` to `tools`."""
    for position, item in enumerate(items):
        if item.get("type") in ("additional_tools", "tool_search_output"):
            path = f"input[{position}].tools"
            inner = item.get("tools")
            if not isinstance(inner, list | None):
                raise invalid_type(path, "an array")
            for number, tool in enumerate(inner or ()):
                tools.add(tool, f"{path}[{number}]")


def to_messages(items: list[Json], instructions: str | None, tools: ResponsesTools) -> tuple[Message, ...]:
    """Return the conversation. Call `collect_tools` first, which adds the input's own tools. Raises RequestError."""
    ids = {item["id"] for item in items if isinstance(item.get("id"), str) and not is_reference(item)}
    reader = _ItemReader(tools, ids)
    for position, item in enumerate(items):
        reader.read(item, f"input[{position}]")
    messages = [entry.message if isinstance(entry, _AnswerDraft) else entry for entry in reader.entries]
    return tuple(_with_one_system_message(messages, instructions))


@dataclass(slots=True)
class _AnswerDraft(AssistantDraft):
    answer_id: str | None = None
    """Id of the call of this answer, read from the ids of the items. None if no item has an id from Polar."""


class _ItemReader:
    """Reads items in order into messages. `ids`: the ids of the input's items, without those that only refer to an
    item."""

    def __init__(self, tools: ResponsesTools, ids: set[str]) -> None:
        self._tools = tools
        self._ids = ids
        self.entries: list[Message | _AnswerDraft] = []
        self._draft: _AnswerDraft | None = None
        self._answered = False
        """True if tool outputs follow the current draft."""

    def read(self, item: Json, path: str) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if kind == "message":
            self._message(item, path)
        elif kind == "reasoning":
            self._reasoning(item, path)
        elif kind == "function_call":
            name, arguments = string_field(item, "name", path), item.get("arguments")
            if not isinstance(arguments, str):
                arguments = "" if arguments is None else to_json(arguments, f"{path}.arguments").decode()
            self._call(item, self._offered_name(item, name, path), arguments)
        elif kind == "custom_tool_call":
            name, text = string_field(item, "name", path), string_field(item, "input", path)
            is_raw = str(item.get("id")).startswith("ctcraw_")
            arguments = text if is_raw else custom_arguments(text, f"{path}.input")
            self._call(item, self._offered_name(item, name, path), arguments)
        elif isinstance(kind, str) and kind in _BUILT_IN_CALLS:
            self._built_in_call(item, _BUILT_IN_CALLS[kind], path)
        elif kind == "tool_search_call":
            value = item.get("arguments")
            arguments = value if isinstance(value, str) else to_json(value, f"{path}.arguments").decode()
            self._call(item, self._tools.offered_name(None, "tool_search"), arguments)
        elif kind in ("function_call_output", "custom_tool_call_output", "shell_call_output"):
            self._output(item, item.get("output"), path)
        elif kind == "local_shell_call_output":
            self._output({"call_id": item.get("id"), **item}, item.get("output"), path)
        elif kind == "apply_patch_call_output":
            self._output(item, item.get("output") or item.get("status"), path)
        elif kind == "tool_search_output":
            self._output(item, {"tools": self._found_tools(item, path)}, path)
        else:
            self._other(item, kind, path)

    def _draft_of(self, item: Json, fits: bool) -> _AnswerDraft:
        """Return the draft of the assistant message that an item belongs to: the current draft or a new one.

        If the item and the current draft both have ids from Polar, the item joins the draft exactly if the ids are from
        the same answer. Otherwise the item joins if it `fits` (the draft can take an item of this kind) and no tool
        output came in between.
        """
        answer_id, draft = answer_of_item(item.get("id")), self._draft
        if draft is not None and answer_id is not None and draft.answer_id is not None:
            joins = answer_id == draft.answer_id
        else:
            joins = draft is not None and fits and not self._answered
        if draft is None or not joins:
            draft = self._draft = _AnswerDraft()
            self._answered = False
            self.entries.append(draft)
        draft.answer_id = draft.answer_id or answer_id
        return draft

    def _text_fits(self) -> bool:
        """Return whether text or reasoning may be added to the current draft.

        True if the draft has no text yet, or has tool calls already. False if there is no draft, or if it has text and
        no tool calls: the next text or reasoning then begins another answer.
        """
        return self._draft is not None and (not self._draft.text or bool(self._draft.tool_calls))

    def _append(self, message: Message) -> None:
        self.entries.append(message)
        if message.role == "tool":
            self._answered = True
        else:
            self._draft = None

    def _message(self, item: Json, path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"{path}.role", f"expected one of {', '.join(sorted(_ROLES))}")
        content = _read_content(item.get("content"), f"{path}.content")
        if role != "assistant":
            self._append(Message(_ROLES[role], content))
            return
        if not isinstance(content, str):
            other = next((part["type"] for part in content if part["type"] != "text"), None)
            if other is not None:
                raise invalid(f"{path}.content", f"an assistant message cannot hold a part of type {other!r:.80}")
            content = "".join(part["text"] for part in content)
        self._draft_of(item, self._text_fits()).text.append(content)

    def _reasoning(self, item: Json, path: str) -> None:
        text = unseal(item.get("encrypted_content"))
        for key in ("content", "summary"):
            if not text:
                text = _joined(item.get(key), f"{path}.{key}")
        if text:
            self._draft_of(item, self._text_fits()).reasoning.append(text)

    def _offered_name(self, item: Json, name: str, path: str) -> str:
        namespace = item.get("namespace")
        if not isinstance(namespace, str | None):
            raise invalid_type(f"{path}.namespace", "a string")
        return self._tools.offered_name(namespace, name)

    def _call(self, item: Json, name: str, arguments: str) -> None:
        self._draft_of(item, True).tool_calls.append(ToolCall(optional_string(item, "call_id") or "", name, arguments))

    def _built_in_call(self, item: Json, name: str, path: str) -> None:
        field_path = f"{path}.{BUILT_IN_TOOLS[name].arguments_field}"
        content = item.get(BUILT_IN_TOOLS[name].arguments_field)
        if not isinstance(content, dict):
            raise invalid_type(field_path, "an object")
        arguments = to_json(built_in_arguments(name, content), field_path).decode()
        self._call(item, self._tools.offered_name(None, name), arguments)

    def _output(self, item: Json, output: Any, path: str) -> None:
        is_parts = isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output)
        content: str | list[Json]
        if output is None or isinstance(output, str) or is_parts:
            content = _read_content(output, f"{path}.output")
        else:
            content = to_json(output, f"{path}.output").decode()
        self._append(Message("tool", content, tool_call_id=optional_string(item, "call_id") or ""))

    def _found_tools(self, item: Json, path: str) -> list[Json]:
        """Return the name and description of each tool in the result of a tool search.

        Parameters are left out: `collect_tools` adds the full definitions of these tools to the offered tools.
        """
        found: list[Json] = []
        for raw in item.get("tools") or ():
            for name in self._tools.add(raw, f"{path}.tools"):
                function = self._tools.by_name[name].function
                found.append({key: function[key] for key in ("name", "description") if key in function})
        return found

    def _other(self, item: Json, kind: Any, path: str) -> None:
        if not isinstance(kind, str | None):
            raise invalid_type(f"{path}.type", "a string")
        if is_reference(item):
            if item["id"] not in self._ids:
                raise item_not_found(item["id"])
            return
        if kind in _IGNORED:
            return
        if kind in ("compaction", "compaction_summary", "context_compaction"):
            summary = unseal(item.get("encrypted_content"))
            if summary is not None:
                self._append(Message("user", summary))
                return
        has_content = any(item.get(key) not in (None, "", [], {}) for key in _CONTENT_FIELDS)
        if has_content or kind is None or kind == "compaction_trigger":
            what = "an item without a type" if kind is None else f"an item of type {kind!r:.80}"
            problem = f"{what} cannot be shown to this model, and leaving it out would change the conversation"
            raise invalid(path, problem, code="unsupported_value")


def input_items(value: Any) -> list[Json]:
    """Return the field `input` of a body as items; a string is a user message. Raises RequestError."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid_type("input", "a string or an array of items")
    for position, item in enumerate(value):
        if not isinstance(item, dict):
            raise invalid_type(f"input[{position}]", "an object")
    return value


def is_reference(item: Json) -> bool:
    """Return whether an item of the input only names another item by its id."""
    kind = item.get("type")
    return isinstance(item.get("id"), str) and (
        kind == "item_reference" or (kind is None and not {"role", "content"} & item.keys())
    )


def _joined(value: Any, path: str) -> str:
    content = _read_content(value, path)
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _read_content(value: Any, path: str) -> str | list[Json]:
    """Return content as a string, or as content parts of Chat Completions. Raises RequestError."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid_type(path, "a string or an array of content parts")
    return as_content([_read_part(part, f"{path}[{number}]") for number, part in enumerate(value)])


def _read_part(part: Any, path: str) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(path, "expected a content part with a type")
    if kind in _TEXT_PARTS or kind == "refusal":
        return text_part(string_field(part, "refusal" if kind == "refusal" else "text", path))
    if kind in ("input_image", "computer_screenshot") and isinstance(part.get("image_url"), str):
        image: Json = {"url": part["image_url"]}
        if isinstance(part.get("detail"), str):
            image["detail"] = part["detail"]
        return {"type": "image_url", "image_url": image}
    if kind == "input_file" and (isinstance(part.get("file_data"), str) or isinstance(part.get("file_url"), str)):
        keys = ("file_data", "file_url", "filename")
        return {"type": "file", "file": {key: part[key] for key in keys if isinstance(part.get(key), str)}}
    if kind in ("input_audio", "image_url", "file") and isinstance(part.get(kind), dict):
        return {"type": kind, kind: part[kind]}
    advice = " by the id of an uploaded file; send the file's data" if part.get("file_id") else ""
    raise invalid(path, f"a content part of type {kind!r:.80} cannot be read here{advice}", code="unsupported_value")


def _with_one_system_message(messages: list[Message], instructions: str | None) -> list[Message]:
    """Join `instructions` and the system messages at the beginning into one message."""
    leading = list(takewhile(lambda message: message.role == "system", messages))
    head = [Message("system", instructions), *leading] if instructions else leading
    if len(head) < 2:
        return [*head, *messages[len(leading) :]]
    parts: list[Json] = []
    for message in head:
        parts += [text_part(message.content)] if isinstance(message.content, str) else message.content or []
    text = "\n\n".join(part["text"] for part in parts if part["type"] == "text")
    content = as_content([text_part(text), *(part for part in parts if part["type"] != "text")])
    return [Message("system", content), *messages[len(leading) :]]
