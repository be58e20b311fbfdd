"""Text of the config files that harnesses read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from harness_adapters.base import HarnessError, McpServer, Skill

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_FOLDER_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def json_text(value: object) -> str:
    """Return `value` as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def toml_text(table: Mapping[str, object]) -> str:
    """Return `table` as TOML. Values are strings, booleans, numbers, lists of them, and tables."""
    return "\n".join(_toml_lines(table, ())) + "\n"


def _toml_lines(table: Mapping[str, object], path: tuple[str, ...]) -> Iterable[str]:
    # Plain values first: in TOML, all lines after a [table] belong to it.
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    for key, value in table.items():
        if key not in tables:
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in tables.items():
        inner = (*path, key)
        yield ""
        yield f"[{'.'.join(map(_toml_key, inner))}]"
        yield from _toml_lines(value, inner)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, str):
        # A JSON string is a TOML string, except for DEL. Escaping non-ASCII would write surrogate pairs, which TOML
        # forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"cannot write {value!r} as TOML")


def skill_files(folder: str, skills: Iterable[Skill]) -> dict[str, str]:
    """Return the files of `skills` below `folder`, which is relative to HOME.

    Raises `HarnessError` for a name that the Agent Skills format forbids: it could lead out of the folder.
    """
    files = {}
    for skill in skills:
        if not _FOLDER_NAME.fullmatch(skill.name):
            raise HarnessError(f"invalid skill name {skill.name!r}: use lower-case letters, digits and single hyphens")
        files[f"{folder}/{skill.name}/SKILL.md"] = skill.text
    return files


def mcp_table(servers: Iterable[McpServer], url_key: str = "url", **remote: object) -> dict[str, dict[str, object]]:
    """Return `servers` in the form most clients share: command, args and env; or `url_key` and `remote`."""
    table: dict[str, dict[str, object]] = {}
    for server in servers:
        if server.url is not None:
            table[server.name] = {**remote, url_key: server.url}
        elif server.command:
            table[server.name] = {
                "command": server.command[0],
                "args": list(server.command[1:]),
                "env": dict(server.env),
            }
        else:
            raise HarnessError(f"MCP server {server.name!r} has neither a command nor a url")
    return table
