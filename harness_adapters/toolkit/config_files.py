"""Texts of the config files that harnesses read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from harness_adapters.base import HarnessError, McpServer, Skill

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_FOLDER_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def json_text(value: object) -> str:
    """`value` as JSON for people to read."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def toml_text(table: Mapping[str, object]) -> str:
    """`table` as TOML: strings, booleans, numbers, lists of them, and tables of all of these."""
    return "\n".join(_toml_lines(table, ())) + "\n"


def _toml_lines(table: Mapping[str, object], path: tuple[str, ...]) -> Iterable[str]:
    # Plain values first: in TOML, whatever follows a [table] belongs to it.
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
        # A JSON string is a TOML string, but for DEL; escapes of other characters would be halves of pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"not for TOML: {value!r}")


def skill_files(folder: str, skills: Iterable[Skill]) -> dict[str, str]:
    """The files of `skills` below `folder`, which is relative to HOME.

    Raises `HarnessError` for a name that the Agent Skills form does not allow, which could leave the folder.
    """
    files = {}
    for skill in skills:
        if not _FOLDER_NAME.fullmatch(skill.name):
            raise HarnessError(f"a skill is named with small letters, digits and single hyphens, not {skill.name!r}")
        files[f"{folder}/{skill.name}/SKILL.md"] = skill.text
    return files


def mcp_table(servers: Iterable[McpServer], url_key: str = "url", **remote: object) -> dict[str, dict[str, object]]:
    """`servers` in the form that most clients share: command, args and env; or `url_key`, with `remote` added."""
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
