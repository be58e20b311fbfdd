"""The protocol of a harness adapter.

An adapter says how one agent program is installed, how it is started against a base URL, and how its exit is
to be read. It only describes: it starts no agent, opens no sandbox and knows nothing of Polar. Promises:

* `install` is idempotent and safe to call from several processes at once; what it returns is complete.
* Nothing is ever installed into the environment that runs Polar.
* `launch` is pure: the same arguments give an equal plan, and nothing is read or written.
* The API key appears in the plan's environment or files only, never in its argument list, where every user of
  the machine could read it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

ExitOutcome = Literal["ok", "failed", "timed_out"]


class HarnessError(Exception):
    """Something about a harness went wrong; the text says what, and what to do."""


class UnknownHarnessError(HarnessError, LookupError):
    """No adapter has this name; the message lists those that exist."""


class InstallError(HarnessError):
    """The harness could not be installed; the text carries the end of the installer's output."""


WireApi = Literal["openai_chat", "openai_responses", "anthropic_messages", "google_generate_content"]
Feature = Literal["stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"]


@dataclass(frozen=True)
class HarnessInfo:
    """What is known of a harness before anything is installed."""

    homepage: str
    package: str
    """Where it comes from, as the installer names it: ``npm:@openai/codex``, ``pypi:mini-swe-agent``."""
    tested_versions: tuple[str, str]
    """The versions, lowest and highest, that this adapter was run with."""
    wire_apis: tuple[WireApi, ...]
    """Dialects it can be told to speak; the first is the one the adapter uses."""
    runtime: str
    """What it runs on: ``python 3.12``, ``node 22``, ``native``."""
    features: frozenset[Feature]
    notes: str = ""
    """What a user must know, such as an exit code that lies."""
    needs: tuple[str, ...] = ()
    """Programs that must be on PATH in the sandbox, beside what is installed."""
    version_command: tuple[str, ...] = ("{program}", "--version")
    """Prints the version of what is installed; ``{program}`` and ``{root}`` are those of `Installation`."""


@dataclass(frozen=True)
class McpServer:
    """A Model Context Protocol server that the harness shall offer to its model: started by `command`, or at `url`."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Skill:
    """A skill in the Agent Skills form: `text` is its SKILL.md, front matter included."""

    name: str
    text: str


@dataclass(frozen=True)
class Installation:
    """A harness that stands ready in the cache."""

    name: str
    version: str
    root: Path
    """Folder that holds everything the harness needs beside `mounts`."""
    program: Path
    """What is started: an interpreter or an executable."""
    mounts: tuple[Path, ...] = ()
    """Host paths, `root` included, that a sandbox must show read-only at the same place."""


@dataclass(frozen=True)
class LaunchContext:
    """What a run supplies. All paths are as the harness sees them, inside the sandbox."""

    base_url: str
    """OpenAI base URL, ending in ``/v1``. Anthropic and Google clients add the version themselves: `root_url`."""
    api_key: str
    """Key of the run's session."""
    model: str
    """Model name as the endpoint lists it."""
    instruction: str
    """The task, in plain language."""
    home: str
    """An empty, writable HOME."""
    workdir: str
    """The workspace; the sandbox starts the program there."""
    max_steps: int = 15
    """Most model calls that the agent may make, where the harness has such a limit."""
    command_timeout_seconds: int = 30
    """Limit of each command the agent runs, where the harness has such a limit."""
    request_timeout_seconds: float = 300.0
    """How long the harness waits for one model answer."""
    context_length: int | None = None
    """Tokens that the model reads at most, where the harness can be told: it then summarises in time."""
    resume: bool = False
    """Go on with the last conversation of this HOME and workspace instead of beginning one."""
    wire_api: WireApi | None = None
    """Dialect to speak, one of the adapter's `HarnessInfo.wire_apis`; None: its first."""
    mcp_servers: tuple[McpServer, ...] = ()
    skills: tuple[Skill, ...] = ()

    @property
    def root_url(self) -> str:
        """The base URL without its version."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True)
class LaunchPlan:
    """How to start the harness: run `argv` in the workspace with exactly `env` added to the sandbox's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Path relative to HOME -> text, to be written before the start."""
    mounts: tuple[Path, ...] = ()
    """Host paths that must be visible read-only, at the same place, inside the sandbox."""


@runtime_checkable
class HarnessAdapter(Protocol):
    """One agent program."""

    name: str
    default_version: str
    facts: HarnessInfo

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        """Return the harness from the cache below `cache_root`, installing it first when it is not there.

        Blocks, for minutes at the first time. Raises `InstallError`.
        """
        ...

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        """Whether `install` would return at once."""
        ...

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        """Return how to start it. Raises `HarnessError` for what this harness cannot do (resume, MCP, a wire API)."""
        ...

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        """Read its exit: the outcome and one line for people. `exit_code` is None when the clock ended it."""
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
    "shell": "harness_adapters.shell:Shell",
    "terminus-2": "harness_adapters.terminus_2:Terminus2",
}
_COMMAND_LINE = "shell:"


def require_supported(name: str, facts: HarnessInfo, context: LaunchContext) -> WireApi:
    """The wire API to speak in a run. Raises `HarnessError` where `context` asks for what `facts` do not name."""
    asked = (("resume", context.resume), ("mcp", context.mcp_servers), ("skills", context.skills))
    told = {
        "resume": "keeps no conversation that it could go on with",
        "mcp": "knows no MCP servers",
        "skills": "knows no skills",
    }
    for feature, wanted in asked:
        if wanted and feature not in facts.features:
            raise HarnessError(f"{name} {told[feature]}")
    wire_api = context.wire_api or facts.wire_apis[0]
    if wire_api not in facts.wire_apis:
        raise HarnessError(f"{name} does not speak {wire_api}; it speaks {', '.join(facts.wire_apis)}")
    return wire_api


def split_version(name: str) -> tuple[str, str | None]:
    """Take ``NAME@VERSION`` apart; a command line after ``shell:`` is whole."""
    if name.startswith(_COMMAND_LINE):
        return name, None
    bare, _, version = name.partition("@")
    return bare, version or None


def list_adapters() -> tuple[str, ...]:
    """Names of the adapters that come with the package, sorted."""
    return tuple(sorted(_BUILT_IN))


def get_adapter(name: str) -> HarnessAdapter:
    """Return the adapter called `name`, one of your own given as ``module:Class``, or a command line after ``shell:``.

    Raises `UnknownHarnessError` when there is none, `TypeError` when the class is not an adapter.
    """
    if name.startswith(_COMMAND_LINE):
        from harness_adapters.shell import ShellCommand  # it imports this module

        return ShellCommand(name.removeprefix(_COMMAND_LINE))
    target = _BUILT_IN.get(name, name)
    module_name, separator, class_name = target.partition(":")
    if not separator:
        known = ", ".join(list_adapters())
        raise UnknownHarnessError(f"no harness {name!r}; there are: {known}; or give module:Class or 'shell:COMMAND'")
    try:
        adapter = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise UnknownHarnessError(f"cannot load harness adapter {target!r}: {error}") from error
    if not isinstance(adapter, HarnessAdapter):
        raise TypeError(f"{target} is no harness adapter: see harness_adapters.base.HarnessAdapter")
    return adapter
