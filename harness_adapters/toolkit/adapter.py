"""Base classes of the adapters, and functions that write the files that harnesses read (TOML, skills)."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness_adapters.base import (
    Connection,
    Endpoint,
    ExitOutcome,
    HarnessAdapter,
    HarnessError,
    Installation,
    LaunchContext,
    LaunchPlan,
    McpServer,
    Skill,
    WireApi,
)

SESSION_KEY = "POLAR_SESSION_KEY"
"""Name of the environment variable with the session's key, for harnesses whose settings name a variable instead of
holding the key. (The variable POLAR_API_KEY is for the key of Polar's own HTTP API.)"""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_FOLDER_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class RunLimit:
    """A limit at which the harness ends a run. Such a run counts as successful."""

    exit_code: int
    name: str
    pattern: str = ""
    """Regular expression. A run that exited with `exit_code` has reached this limit only if its output matches. `^` and
    `$` match at each line."""


class BaseHarness(HarnessAdapter):
    """Implements `HarnessAdapter` except for the installation and the launch plan."""

    skills_folder: str = ""
    """Folder, relative to HOME, from which the harness reads skills."""
    success: str = "finished"
    """Message of a run that ended with exit code 0."""
    limits: Sequence[RunLimit] = ()
    error_prefixes: tuple[str, ...] = ()
    """Beginnings of output lines that report an error. A failure's message quotes the last such line, else the last
    line of output."""

    @abstractmethod
    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        """Return argument list, environment and files of a run. `launch` adds HOME and the skills."""

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        plan = self.make_plan(installed, context, self._check_support(context))
        return replace(
            plan,
            env={"HOME": context.home, **plan.env},
            files={**plan.files, **skill_files(self.skills_folder, context.skills)},
        )

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        for limit in self.limits:
            if exit_code == limit.exit_code and re.search(limit.pattern, stdout_tail, re.MULTILINE):
                return "ok", f"ended by {limit.name}"
        if exit_code is None:
            return "timed_out", f"{self.label} was stopped at its time limit"
        if exit_code == 0:
            return "ok", self.success
        lines = [line.strip() for line in stdout_tail.splitlines() if line.strip(" │╭╮╰╯─")]
        errors = [line for line in lines if line.startswith(self.error_prefixes)] or lines or ["no output"]
        return "failed", f"{self.label} exited with {exit_code}: {errors[-1][:400]}"

    @property
    def label(self) -> str:
        """The harness's name in messages."""
        return self.name

    def _check_support(self, context: LaunchContext) -> WireApi:
        """Return the wire API for a run. Raises `HarnessError` if `context` asks for something that `info` lacks."""
        wire_api = self.choose_wire_api(context)
        name, info = self.name, self.info
        if context.resume and "resume" not in info.features:
            raise HarnessError(f"{name} cannot resume a conversation")
        if context.mcp_servers and "mcp" not in info.features:
            raise HarnessError(f"{name} does not support MCP servers")
        if context.skills and "skills" not in info.features:
            raise HarnessError(f"{name} does not support skills")
        return wire_api

    def choose_wire_api(self, endpoint: Endpoint) -> WireApi:
        """Return the wire API to speak. Raises `HarnessError` if the harness does not speak the requested one."""
        known = self.info.wire_apis
        wire_api = endpoint.wire_api or known[0]
        if wire_api not in known:
            raise HarnessError(f"{self.name} does not speak {wire_api}; it speaks {', '.join(known)}")
        return wire_api


class ConnectableHarness(BaseHarness):
    """A harness that users can also install and start themselves, by the program `info.command`."""

    acp_arguments: tuple[str, ...] = ()
    """Arguments with which the program speaks the Agent Client Protocol (ACP); empty if it does not speak ACP."""

    @property
    @abstractmethod
    def install_command(self) -> tuple[str, ...]:
        """The command by which a user installs the harness."""

    @abstractmethod
    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        """Return environment, arguments and settings files that point the harness at `endpoint`.

        `make_plan` adds what only an unattended run needs.
        """

    @property
    def speaks_acp(self) -> bool:
        return bool(self.acp_arguments)

    @property
    def speaks_only_acp(self) -> bool:
        """Whether every run of this adapter uses the Agent Client Protocol."""
        return False

    def command(self, installed: Installation) -> list[str]:
        """Return the program and its first arguments, which start the harness."""
        return [str(installed.program)]

    def make_acp_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        """Return how to start the program as an ACP agent. Raises `HarnessError` if it does not speak ACP."""
        if not self.acp_arguments:
            raise HarnessError(f"{self.name} does not speak ACP")
        plan = self.make_plan(installed, context, wire_api)
        connection = self.make_connection(context, wire_api)
        return replace(plan, argv=(*self.command(installed), *self.acp_arguments, *connection.arguments))

    def connect(self, endpoint: Endpoint) -> Connection:
        """Return the connection to `endpoint`. Raises `HarnessError` if the harness does not speak the endpoint's wire
        API."""
        return self.make_connection(endpoint, self.choose_wire_api(endpoint))


def make_launch_plan(
    connection: Connection,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    settings: Mapping[str, Mapping[str, object]] | None = None,
    files: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return a launch plan of `argv`, with the environment and the settings files of `connection`.

    `env`, `settings` and `files` are added. Tables in `settings` are merged into the connection's tables.
    """
    merged = _merge(connection.settings, settings or {})
    return LaunchPlan(
        argv=tuple(argv), env={**connection.env, **(env or {})}, files={**settings_files(merged), **(files or {})}
    )


def settings_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each settings file by its path."""
    return {path: (toml_text if path.endswith(".toml") else json_text)(content) for path, content in settings.items()}


def _merge(base: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `added`: tables are merged, all other values replaced."""
    merged = dict(base)
    for key, value in added.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def json_text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def toml_text(table: Mapping[str, object]) -> str:
    """Return `table` as TOML. Values are strings, booleans, numbers, tables, and lists of these."""
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
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(key)} = {_toml_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"cannot write {value!r} as TOML")


def skill_files(folder: str, skills: Iterable[Skill]) -> dict[str, str]:
    """Return the files of `skills` below `folder`, which is relative to HOME.

    Raises `HarnessError` for a name that the Agent Skills format forbids, because such a name could lead out of the
    folder.
    """
    files = {}
    for skill in skills:
        if not _FOLDER_NAME.fullmatch(skill.name):
            raise HarnessError(f"invalid skill name {skill.name!r}: use lower-case letters, digits and single hyphens")
        files[f"{folder}/{skill.name}/SKILL.md"] = skill.text
    return files


def mcp_table(servers: Iterable[McpServer], url_key: str = "url", **remote: object) -> dict[str, dict[str, object]]:
    """Return the settings of each server by its name, in the form that most clients share.

    A server with a command has the settings command, args and env. A server with a URL has the settings in `remote`,
    and its URL as the setting named `url_key`.
    """
    table: dict[str, dict[str, object]] = {}
    for server in servers:
        if server.url is not None:
            table[server.name] = {**remote, url_key: server.url}
        else:
            table[server.name] = {
                "command": server.command[0],
                "args": list(server.command[1:]),
                "env": dict(server.env),
            }
    return table
