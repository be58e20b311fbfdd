"""From Responses input items to the canonical conversation.

What one answer said comes back as several items (reasoning, message, one per call); they become one assistant message
again, as it was recorded. Items belong together when their ids say so, or else when nothing of another kind stands
between them and they are in the order in which an answer speaks.

No item is dropped that holds something for the model to read. Ignored are web search calls (nobody here made them),
lists of MCP tools, reasoning that another provider encrypted, and items of unknown type without content; references to
items that the input holds anyway. All else that cannot be shown to the model is refused, naming `input[i]`.

System and developer messages at the head become one system message, with `instructions` first: templates of open
models know neither the developer role nor a second system message there. Later ones are system messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polar_proxy.dialects.base import to_json
from polar_proxy.dialects.openai_responses.custom_input import broken
from polar_proxy.dialects.openai_responses.items import answer_of_item, unseal
from polar_proxy.dialects.openai_responses.tools import BUILT_IN_TOOLS, Toolbox, built_in_arguments
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, Message, ToolCall

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_TEXTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}
_HARMLESS = {"web_search_call", "mcp_list_tools", "additional_tools", "item_reference"}
_CONTENT = ("content", "encrypted_content", "output", "outputs", "input", "text", "arguments", "result", "results",
            "action", "actions", "operation", "code", "queries", "tools", "summary", "error")  # fmt: skip
_BUILT_IN_CALLS = {known.item: name for name, known in BUILT_IN_TOOLS.items()}


def collect_tools(tools: Toolbox, items: list[Json]) -> None:
    """Add the tools that stand inside the input."""
    for position, item in enumerate(items):
        if item.get("type") in ("additional_tools", "tool_search_output"):
            where = f"input[{position}].tools"
            inner = item.get("tools")
            if not isinstance(inner, list | None):
                raise RequestError(f"Invalid type for '{where}': expected an array.", param=where, code="invalid_type")
            for number, tool in enumerate(inner or ()):
                tools.add(tool, f"{where}[{number}]")


def to_messages(items: list[Json], instructions: str | None, tools: Toolbox) -> tuple[Message, ...]:
    """The conversation; `tools` must hold those of `collect_tools` already. Raises RequestError."""
    ids = {item["id"] for item in items if isinstance(item.get("id"), str) and not _is_reference(item)}
    reader = _ItemReader(tools, ids)
    for position, item in enumerate(items):
        reader.read(item, f"input[{position}]")
    messages = [said.message() if isinstance(said, _AnswerDraft) else said for said in reader.said]
    return tuple(_one_head(messages, instructions))


@dataclass(slots=True)
class _AnswerDraft:
    """An assistant message in the making."""

    answer: str | None = None
    """What the ids of its items have in common, if any has an id from here."""
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        text = "".join(self.texts) if self.texts or not self.calls else None
        reasoning = "".join(self.reasoning) if self.reasoning else None
        return Message("assistant", text, reasoning, tuple(self.calls))


class _ItemReader:
    def __init__(self, tools: Toolbox, ids: set[str]) -> None:
        self._tools = tools
        self._ids = ids
        self.said: list[Message | _AnswerDraft] = []
        self._turn: _AnswerDraft | None = None
        self._answered = False
        """Tool outputs stand behind the current turn."""

    def read(self, item: Json, where: str) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "function_call":
            name, arguments = _text(item, "name", where), item.get("arguments")
            if not isinstance(arguments, str):
                arguments = "" if arguments is None else to_json(arguments, f"{where}.arguments").decode()
            self._call(item, self._offered(item, name, where), arguments)
        elif kind == "custom_tool_call":
            name, text = _text(item, "name", where), _text(item, "input", where)
            raw = str(item.get("id")).startswith("ctcraw_") or broken(text)
            arguments = text if raw else to_json({"input": text}, f"{where}.input").decode()
            self._call(item, self._offered(item, name, where), arguments)
        elif isinstance(kind, str) and kind in _BUILT_IN_CALLS:
            self._built_in(item, _BUILT_IN_CALLS[kind], where)
        elif kind == "tool_search_call":
            value = item.get("arguments")
            arguments = value if isinstance(value, str) else to_json(value, f"{where}.arguments").decode()
            self._call(item, self._tools.offered_name(None, "tool_search"), arguments)
        elif kind in ("function_call_output", "custom_tool_call_output", "shell_call_output"):
            self._output(item, item.get("output"), where)
        elif kind == "local_shell_call_output":
            self._output({"call_id": item.get("id"), **item}, item.get("output"), where)
        elif kind == "apply_patch_call_output":
            self._output(item, item.get("output") or item.get("status"), where)
        elif kind == "tool_search_output":
            self._output(item, {"tools": self._found(item, where)}, where)
        else:
            self._other(item, kind, where)

    def _open(self, item: Json, fits: bool) -> _AnswerDraft:
        """The turn that an item of an answer belongs to; `fits`: it may be the current one by its place."""
        answer, turn = answer_of_item(item.get("id")), self._turn
        if turn is not None and answer is not None and turn.answer is not None:
            joins = answer == turn.answer
        else:
            joins = turn is not None and fits and not self._answered
        if turn is None or not joins:
            turn = self._turn = _AnswerDraft()
            self._answered = False
            self.said.append(turn)
        turn.answer = turn.answer or answer
        return turn

    def _other_side(self, message: Message) -> None:
        self.said.append(message)
        if message.role == "tool":
            self._answered = True
        else:
            self._turn = None

    def _message(self, item: Json, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(
                f"Invalid value for '{where}.role': expected one of {', '.join(sorted(_ROLES))}.",
                param=f"{where}.role",
                code="invalid_value",
            )
        content = read_content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._other_side(Message(_ROLES[role], content))
            return
        if not isinstance(content, str):
            other = next((part["type"] for part in content if part["type"] != "text"), None)
            if other is not None:
                raise RequestError(
                    f"Invalid '{where}.content': an assistant message cannot hold a part of type {other!r}.",
                    param=f"{where}.content",
                )
            content = "".join(part["text"] for part in content)
        turn = self._turn
        self._open(item, turn is not None and (not turn.texts or bool(turn.calls))).texts.append(content)

    def _reasoning(self, item: Json, where: str) -> None:
        text = unseal(item.get("encrypted_content"))
        for key in ("content", "summary"):
            if not text:
                text = _joined(item.get(key), f"{where}.{key}")
        if text:
            turn = self._turn
            self._open(item, turn is not None and (not turn.texts or bool(turn.calls))).reasoning.append(text)

    def _offered(self, item: Json, name: str, where: str) -> str:
        namespace = item.get("namespace")
        if not isinstance(namespace, str | None):
            param = f"{where}.namespace"
            raise RequestError(f"Invalid type for '{param}': expected a string.", param=param, code="invalid_type")
        return self._tools.offered_name(namespace, name)

    def _call(self, item: Json, name: str, arguments: str) -> None:
        self._open(item, True).calls.append(ToolCall(_call_id(item), name, arguments))

    def _built_in(self, item: Json, name: str, where: str) -> None:
        param = f"{where}.{BUILT_IN_TOOLS[name].holder}"
        holder = item.get(BUILT_IN_TOOLS[name].holder)
        if not isinstance(holder, dict):
            raise RequestError(f"Invalid type for '{param}': expected an object.", param=param, code="invalid_type")
        arguments = to_json(built_in_arguments(name, holder), param).decode()
        self._call(item, self._tools.offered_name(None, name), arguments)

    def _output(self, item: Json, output: Any, where: str) -> None:
        param = f"{where}.output"
        shown = isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output)
        if output is None or isinstance(output, str) or shown:
            content = read_content(output, param)
        else:
            content = to_json(output, param).decode()
        self._other_side(Message("tool", content, tool_call_id=_call_id(item)))

    def _found(self, item: Json, where: str) -> list[Json]:
        """The tools that a search found, as a short list; their definitions are offered, see `collect_tools`."""
        out: list[Json] = []
        for raw in item.get("tools") or ():
            for name in self._tools.add(raw, f"{where}.tools"):
                offered = self._tools.tools[name].offered
                out.append({key: offered[key] for key in ("name", "description") if key in offered})
        return out

    def _other(self, item: Json, kind: Any, where: str) -> None:
        if not isinstance(kind, str | None):
            param = f"{where}.type"
            raise RequestError(f"Invalid type for '{param}': expected a string.", param=param, code="invalid_type")
        if _is_reference(item):
            if item["id"] not in self._ids:
                raise RequestError(
                    f"Item {item['id']!r:.80} not found: '{where}' refers to an item that is not in the input. "
                    "Send the item itself, or continue with 'previous_response_id'.",
                    param=where,
                    code="item_not_found",
                )
            return
        if kind in _HARMLESS:
            return
        if kind in ("compaction", "compaction_summary", "context_compaction"):
            summary = unseal(item.get("encrypted_content"))
            if summary is not None:
                self._other_side(Message("user", summary))
                return
        held = next((key for key in _CONTENT if item.get(key) not in (None, "", [], {})), None)
        if held is not None or kind is None or kind == "compaction_trigger":
            what = "an item without a type" if kind is None else f"an item of type {kind!r:.80}"
            raise RequestError(
                f"Unsupported '{where}': {what} cannot be shown to this model, and leaving it out would change the "
                "conversation.",
                param=where,
                code="unsupported_value",
            )


def _is_reference(item: Json) -> bool:
    kind = item.get("type")
    return isinstance(item.get("id"), str) and (
        kind == "item_reference" or (kind is None and not {"role", "content"} & item.keys())
    )


def _text(item: Json, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise RequestError(
            f"Invalid type for '{where}.{key}': expected a string.", param=f"{where}.{key}", code="invalid_type"
        )
    return value


def _call_id(item: Json) -> str:
    call_id = item.get("call_id")
    return call_id if isinstance(call_id, str) else ""


def _joined(value: Any, where: str) -> str:
    content = read_content(value, where)
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def read_content(value: Any, where: str) -> str | list[Json]:
    """Content as a string, or as OpenAI Chat content parts. Raises RequestError."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise RequestError(
            f"Invalid type for '{where}': expected a string or an array of content parts.",
            param=where,
            code="invalid_type",
        )
    parts = [_part(part, f"{where}[{number}]") for number, part in enumerate(value)]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Any, where: str) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"Invalid '{where}': expected a content part with a type.", param=where)
    if kind in _TEXTS or kind == "refusal":
        return {"type": "text", "text": _text(part, "refusal" if kind == "refusal" else "text", where)}
    if kind in ("input_image", "computer_screenshot") and isinstance(part.get("image_url"), str):
        image: Json = {"url": part["image_url"]}
        if isinstance(part.get("detail"), str):
            image["detail"] = part["detail"]
        return {"type": "image_url", "image_url": image}
    if kind == "input_file" and (isinstance(part.get("file_data"), str) or isinstance(part.get("file_url"), str)):
        fields = ("file_data", "file_url", "filename")
        return {"type": "file", "file": {key: part[key] for key in fields if isinstance(part.get(key), str)}}
    if kind in ("input_audio", "image_url", "file") and isinstance(part.get(kind), dict):
        return {"type": kind, kind: part[kind]}
    raise RequestError(
        f"Unsupported '{where}': a content part of type {kind!r:.80} cannot be read here"
        + (" by the id of an uploaded file; send its data." if part.get("file_id") else "."),
        param=where,
        code="unsupported_value",
    )


def _one_head(messages: list[Message], instructions: str | None) -> list[Message]:
    count = 0
    while count < len(messages) and messages[count].role == "system":
        count += 1
    head = ([Message("system", instructions)] if instructions else []) + messages[:count]
    if len(head) < 2:
        return head + messages[count:]
    texts: list[str] = []
    for message in head:
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            texts += [part["text"] for part in message.content or () if part["type"] == "text"]
    others = [part for m in head if isinstance(m.content, list) for part in m.content if part["type"] != "text"]
    text = "\n\n".join(texts)
    content: str | list[Json] = [{"type": "text", "text": text}, *others] if others else text
    return [Message("system", content), *messages[count:]]
