"""The protocol of a harness adapter, and the adapters by name.

An adapter describes how to install one agent program, how to point it at an endpoint, how to start it on a task, and
how to interpret its exit. An adapter starts no agent and opens no sandbox. Each adapter keeps these promises:

* `install` is idempotent and safe to call from several processes at once; the installation it returns is complete.
* Nothing is ever installed into the Python environment that runs Polar.
* `launch` is pure: the same arguments give an equal plan, and nothing is read or written.
* The API key appears in the plan's environment or files only. It is never in the argument list, which every user of the
  machine could read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

WireApi = Literal["openai_chat", "openai_responses", "anthropic_messages", "google_generate_content"]
Feature = Literal["stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"]
ExitOutcome = Literal["ok", "failed", "timed_out"]


class HarnessError(Exception):
    """A harness cannot be started as requested, for instance because it lacks a feature. The text says why."""


class UnknownHarnessError(HarnessError, LookupError):
    """No adapter has this name, or the adapter's class cannot be loaded. The text says which."""


class InstallError(HarnessError):
    """The harness could not be installed. The text gives the reason, with the last output of an installer that
    failed."""


@dataclass(frozen=True)
class HarnessInfo:
    """Properties of a harness that are known before it is installed."""

    homepage: str
    package: str
    """The package's source and name, such as ``npm:@openai/codex`` or ``pypi:mini-swe-agent``."""
    wire_apis: tuple[WireApi, ...]
    """The dialects that the harness can speak. The first is used unless another one is requested."""
    runtime: str
    """The runtime that the harness needs: ``python 3.12``, ``node 22``, ``native``."""
    features: frozenset[Feature]
    notes: str = ""
    """Pitfalls that a user must know, such as an exit code that hides failures."""
    needs: tuple[str, ...] = ()
    """Programs that must be on PATH in the sandbox."""
    version_command: tuple[str, ...] = ("{program}", "--version")
    """Command that prints the installed version. ``{program}`` and ``{root}`` stand for fields of `Installation`."""
    tested_versions: tuple[str, str] | None = None
    """The lowest and the highest version with which this adapter was tested; None if it was tested only with its
    default version."""
    summary: str = ""
    """Description of the harness in a few words."""
    intercepted: bool = False
    """True if the harness's endpoint cannot be set. Its calls to the provider's own host must then be intercepted."""
    command: str = ""
    """Name of the program that users start after they have installed the harness themselves, such as ``codex``."""


@dataclass(frozen=True)
class McpServer:
    """A Model Context Protocol server for the harness to use: started by running `command`, or reached at `url`.

    Raises HarnessError if both are missing.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.url is None and not self.command:
            raise HarnessError(f"MCP server {self.name!r} has neither a command nor a url")


@dataclass(frozen=True)
class Skill:
    """A skill in the Agent Skills format. `text` is its SKILL.md with the front matter."""

    name: str
    text: str


@dataclass(frozen=True)
class Installation:
    """A harness that is installed in the cache."""

    name: str
    version: str
    root: Path
    """Folder of the harness."""
    program: Path
    """The interpreter or executable to start."""
    mounts: tuple[Path, ...] = ()
    """Host paths, `root` included, that a sandbox must mount read-only at the same path."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The model API for a harness, and the folder for the settings that point the harness at it."""

    base_url: str
    """OpenAI base URL, ending in ``/v1``. Clients of Anthropic and Google get `root_url` instead, because they add the
    API version to the URL themselves."""
    api_key: str
    """The session's key, which the harness sends as its API key."""
    model: str
    """Model name as the endpoint lists it."""
    home: str
    """A writable folder for settings; in a sandbox, the empty HOME."""
    request_timeout_seconds: float = 300.0
    """Time limit of one model call."""
    context_length: int | None = None
    """Context length of the model in tokens. A harness with a setting for this length summarises the conversation
    before the context is full."""
    wire_api: WireApi | None = None
    """Dialect to speak, one of `HarnessInfo.wire_apis`; None: the first of them."""

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class LaunchContext(Endpoint):
    """The settings of one run. All paths are paths inside the sandbox."""

    instruction: str
    """The task in natural language."""
    workdir: str
    """The workspace, which is the program's working directory."""
    max_steps: int = 15
    """Maximum number of model calls, for harnesses with such a limit."""
    command_timeout_seconds: int = 30
    """Time limit of each command that the agent runs, for harnesses with such a limit."""
    resume: bool = False
    """Continue the last conversation of this HOME and workspace instead of starting a new one."""
    mcp_servers: tuple[McpServer, ...] = ()
    skills: tuple[Skill, ...] = ()


@dataclass(frozen=True)
class Connection:
    """The environment, arguments and settings files that point a harness at an endpoint.

    Rollouts and `polar connect` both use them. None of them grants the agent a permission or limits its steps. The API
    key is in `env` only.
    """

    env: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    """The first arguments of the program."""
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Settings files: path relative to `Endpoint.home` -> content. The path ends in .json, .toml or .yaml; .yaml files
    are written as JSON."""
    unset: tuple[str, ...] = ()
    """Variables of the user's shell to remove, because the harness would prefer them to the endpoint or its key."""
    note: str = ""
    """Advice for the user before the first start."""


@dataclass(frozen=True)
class LaunchPlan:
    """How to start the harness: run `argv` in the workspace with `env` added to the sandbox's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to write before the start: path relative to HOME -> text."""


@runtime_checkable
class HarnessAdapter(Protocol):
    """The interface to one agent program: how to install it, start it and interpret its end."""

    name: str
    default_version: str
    info: HarnessInfo

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        """Return the harness from the cache below `cache_root`, installing it first if it is missing.

        Blocks, for minutes the first time. Raises `InstallError`.
        """
        ...

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        """Return whether `install` would return at once."""
        ...

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        """Return how to start the harness. Raises `HarnessError` for an option that the harness lacks (resume, MCP, a
        wire API)."""
        ...

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        """Return the outcome of a run and a message of one line. `exit_code` is None after a timeout."""
        ...


_BUILT_IN: Mapping[str, str] = {
    "aider": "harness_adapters.aider:Aider",
    "claude-code": "harness_adapters.claude_code:ClaudeCode",
    "cline": "harness_adapters.cline:Cline",
    "codex": "harness_adapters.codex:Codex",
    "gemini-cli": "harness_adapters.gemini_cli:GeminiCli",
    "mini-swe-agent": "harness_adapters.mini_swe_agent:MiniSweAgent",
    "mistral-vibe": "harness_adapters.mistral_vibe:MistralVibe",
    "opencode": "harness_adapters.opencode:OpenCode",
    "openhands": "harness_adapters.openhands:OpenHands",
    "pi": "harness_adapters.pi:Pi",
    "qwen-code": "harness_adapters.qwen_code:QwenCode",
    "shell": "harness_adapters.shell:ShellCommand",
    "terminus-2": "harness_adapters.terminus_2:Terminus2",
}
_SHELL_PREFIX = "shell:"
_ACP_PREFIX = "acp:"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_!-]{0,63}", re.ASCII)


def split_version(name: str) -> tuple[str, str | None]:
    """Split ``NAME@VERSION``. A command line after ``shell:`` is not split. Raises `HarnessError` for a bad version."""
    if name.startswith(_SHELL_PREFIX):
        return name, None
    bare, _, version = name.partition("@")
    if version:
        check_version(version)
    return bare, version or None


def check_version(version: str) -> None:
    """Raise `HarnessError` for text that an installer would take for an option, a path or a URL."""
    if not _VERSION.fullmatch(version):
        raise HarnessError(f"{version!r} is not a version: give one such as 1.2.3")


def list_adapters(folder: Path | None = None) -> tuple[str, ...]:
    """Return the names of Polar's harnesses, and of those that the user's definition files in `folder` describe."""
    from harness_adapters.definitions.harness import catalogue, user_definitions

    return tuple(sorted({*_BUILT_IN, *catalogue(), *user_definitions(folder)}))


def get_adapter(name: str, folder: Path | None = None) -> HarnessAdapter:
    """Return an adapter.

    `name`: one of `list_adapters`, ``acp:NAME`` for an agent over the Agent Client Protocol, ``module:Class`` for your
    own adapter, or ``shell:`` and a command line. `folder` holds the user's definition files.
    Raises `UnknownHarnessError` if there is no such adapter, or the class is not an adapter; `DefinitionError` for a
    wrong definition file.
    """
    # Imported here, because these modules import this one.
    from harness_adapters.acp.adapter import AcpHarness
    from harness_adapters.definitions.harness import find_definition, load_harness
    from harness_adapters.shell import ShellCommand

    if name.startswith(_SHELL_PREFIX):
        return ShellCommand(name.removeprefix(_SHELL_PREFIX))
    if name.startswith(_ACP_PREFIX):
        agent = name.removeprefix(_ACP_PREFIX)
        if ":" in agent:  # a class's name here would get around the list of allowed code
            raise UnknownHarnessError(f"{agent!r} is not the name of a harness: write acp:NAME")
        return AcpHarness(get_adapter(agent, folder))
    if name not in _BUILT_IN and (path := find_definition(name, folder)) is not None:
        harness = load_harness(path)
        return harness if harness.definition.run is not None else AcpHarness(harness, name=name)
    target = _BUILT_IN.get(name, name)
    module_name, separator, class_name = target.partition(":")
    if not separator:
        known = ", ".join(list_adapters(folder))
        raise UnknownHarnessError(
            f"unknown harness {name!r}; the known ones are: {known}; or give acp:NAME, module:Class or 'shell:COMMAND'"
        )
    try:
        adapter = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise UnknownHarnessError(f"cannot load harness adapter {target!r}: {error}") from error
    except TypeError as error:  # a function, or a class that needs arguments
        raise UnknownHarnessError(f"{_not_an_adapter(target)}. Called without arguments, it failed: {error}") from error
    if not isinstance(adapter, HarnessAdapter):
        raise UnknownHarnessError(
            f"{_not_an_adapter(target)}. This object lacks {', '.join(_missing_members(adapter))}"
        )
    return adapter


def _not_an_adapter(target: str) -> str:
    return (
        f"{target} is not a harness adapter: name a class that is derived from NpmHarness, VenvHarness or BaseHarness "
        "(harness_adapters.toolkit)"
    )


def _missing_members(adapter: object) -> list[str]:
    members = ("name", "default_version", "info", "install", "is_installed", "launch", "interpret")
    return [name for name in members if not hasattr(adapter, name)]
