"""Anthropic-defined tools that the client runs (shell, text editor, memory, computer), as OpenAI functions.

Anthropic's models know the arguments of these tools, so clients send no schema. Other models need a schema, which this
module adds. The client gets a call of such a tool as an ordinary `tool_use` block with the tool's name and arguments.
The type of a tool ends with the date of its version, as in `text_editor_20250728`. A version that is newer than the
versions known here is offered like the newest known version.

Sources: the pages of these tools in https://docs.anthropic.com/en/docs/agents-and-tools/tool-use, and the types of
Anthropic's SDK.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from polar_proxy.dialects.fields import function_tool, object_schema
from polar_proxy.types import Json

_TYPE = re.compile("(bash|text_editor|memory|computer)_([0-9]{8})")
_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer"}
_RANGE: Json = {
    "type": "array",
    "items": _NUMBER,
    "description": "First and last line to show, from 1; -1 as the last line means the end of the file.",
}
_CONTENT: Json = {**_TEXT, "description": "For `create`: the content of the file."}
_INSERT_LINE: Json = {**_NUMBER, "description": "For `insert`: the line after which to insert; 0 is the beginning."}
_INSERT_TEXT: Json = {**_TEXT, "description": "For `insert`: the text."}
_POINT: Json = {"type": "array", "items": _NUMBER, "description": "x and y in pixels, from the top left corner."}


def client_tool(tool: Json) -> Json | None:
    """Return a shell, text editor, memory or computer tool as an OpenAI function; None for any other tool."""
    found = _TYPE.fullmatch(str(tool.get("type")))
    if found is None:
        return None
    kind, version = found.groups()
    description, parameters = _DEFINITIONS[kind](version, tool)
    name = tool.get("name")
    return function_tool(name if isinstance(name, str) and name else _name(kind, version), description, parameters)


def _name(kind: str, version: str) -> str:
    if kind != "text_editor":
        return kind
    return "str_replace_editor" if version < "20250429" else "str_replace_based_edit_tool"


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def _bash(version: str, tool: Json) -> tuple[str, Json]:
    restart = {"type": "boolean", "description": "True restarts the session; no command is needed then."}
    return (
        "Run a command in a bash session that keeps its state between calls, and get its output.",
        object_schema([], command=_TEXT, restart=restart),
    )


def _text_editor(version: str, tool: Json) -> tuple[str, Json]:
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if version < "20250429" else [])]
    has_insert_text = version >= "20250728"
    replacing = "`str_replace`" if has_insert_text else "`str_replace` and `insert`"
    properties = {
        "command": _one_of(*commands),
        "path": {**_TEXT, "description": "The file, or for `view` also a directory."},
        "view_range": _RANGE,
        "file_text": _CONTENT,
        "old_str": {**_TEXT, "description": "For `str_replace`: the text to replace, which must occur exactly once."},
        "new_str": {**_TEXT, "description": f"For {replacing}: the new text."},
        "insert_line": _INSERT_LINE,
    }
    if has_insert_text:
        properties["insert_text"] = _INSERT_TEXT
    text = "View and edit text files."
    most = tool.get("max_characters")
    if isinstance(most, int):
        text += f" `view` shows at most {most} characters."
    return text, object_schema(["command", "path"], **properties)


def _memory(version: str, tool: Json) -> tuple[str, Json]:
    return (
        "Keep notes for later conversations in text files below /memories. Look there before a task.",
        object_schema(
            ["command"],
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            path={**_TEXT, "description": "The file or directory, for all commands but `rename`."},
            view_range=_RANGE,
            file_text=_CONTENT,
            old_str={**_TEXT, "description": "For `str_replace`: the text to replace."},
            new_str={**_TEXT, "description": "For `str_replace`: the new text."},
            insert_line=_INSERT_LINE,
            insert_text=_INSERT_TEXT,
            old_path={**_TEXT, "description": "For `rename`."},
            new_path={**_TEXT, "description": "For `rename`."},
        ),
    )


_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")
"""Actions that the computer tool has only from version 20250124 on."""


def _computer(version: str, tool: Json) -> tuple[str, Json]:
    text = "Use a computer by its screen, mouse and keyboard. A screenshot shows the result of an action."
    width, height = tool.get("display_width_px"), tool.get("display_height_px")
    if isinstance(width, int) and isinstance(height, int):
        text += f" The screen has {width} x {height} pixels."
    later = version >= "20250124"
    actions = [*_ACTIONS, *(_LATER_ACTIONS if later else ())]
    properties: Json = {
        "coordinate": _POINT,
        "text": {**_TEXT, "description": "The text to type, or the keys to press, such as `ctrl+s`."},
    }
    if later:
        properties |= {
            "start_coordinate": {**_POINT, "description": "For `left_click_drag`: where the drag starts."},
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": {**_NUMBER, "description": "For `scroll`: the number of clicks of the wheel."},
            "duration": {"type": "number", "description": "For `hold_key` and `wait`: seconds."},
        }
    if tool.get("enable_zoom") is True:
        actions.append("zoom")
        region = "For `zoom`: x and y of the top left corner, then of the bottom right corner."
        properties["region"] = {"type": "array", "items": _NUMBER, "description": region}
    return text, object_schema(["action"], action=_one_of(*actions), **properties)


_DEFINITIONS: dict[str, Callable[[str, Json], tuple[str, Json]]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}
