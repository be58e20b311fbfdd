"""The keys of a definition file, and the errors for a wrong one.

Strings may hold placeholders (`harness_adapters.toolkit.placeholders`). A value that consists of one placeholder gets
the type of the placeholder's value, such as a number. If the placeholder has no value, such as the context length of
some models, the key or the list item is left out. Each of three placeholders, `{program}`, `{arguments}` and
`{resume}`, is a word of a command line and is replaced by any number of words.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness_adapters.base import Feature, HarnessError, WireApi
from harness_adapters.toolkit.placeholders import check_placeholders, placeholder_names

ENDPOINT_NAMES = ("base_url", "root_url", "model", "home", "context_length", "timeout_seconds", "timeout_ms")
RUN_NAMES = (*ENDPOINT_NAMES, "instruction", "workdir", "max_steps", "command_seconds", "root")
WORDS = ("program", "arguments", "resume")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class DefinitionError(HarnessError):
    """A definition file is wrong. The text names the file and the key."""


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return pattern


Regex = Annotated[str, AfterValidator(_check_regex)]
Words = tuple[str, ...]
Settings = Mapping[str, Mapping[str, Any]]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InstallTable(_Table):
    """Source of the program: one of `npm`, `pypi` and `path`."""

    npm: str | None = None
    """npm package. Needs `version` and `entry`."""
    pypi: str | None = None
    """PyPI package, which gets its own virtual environment. Needs `version` and `imports`."""
    path: str | None = None
    """Absolute path of a program or folder of this machine, which sandboxes mount. Nothing is installed."""
    version: str = ""
    entry: str = ""
    """With `npm`: the native program or script, relative to the folder of installation; may be a glob pattern. With
    `path`: the program, relative to the folder `path`; empty if `path` is the program itself."""
    node: bool = False
    """npm: true if `entry` is a script that Node.js runs."""
    imports: str = ""
    """pypi: names of modules, separated by commas, that are imported to check the installation."""
    pythons: Words = ()
    """pypi: minor versions of Python, best first; default: the Python that runs Polar."""
    extra: Words = ()
    """pypi: further pip requirements."""
    version_command: Words | None = None
    """Command that prints the version; an empty list if there is none. Default: the program with --version, if
    `version` is set."""

    @model_validator(mode="after")
    def check_source(self) -> Self:
        sources = [name for name in ("npm", "pypi", "path") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError("must have exactly one of npm, pypi and path")
        needed = {"npm": ("version", "entry"), "pypi": ("version", "imports"), "path": ()}[sources[0]]
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"{name} is missing; it is required with {sources[0]}")
        if self.path is not None and not PurePosixPath(self.path).is_absolute():
            raise ValueError("path must be absolute")
        return self


class ConnectionTable(_Table):
    """Variables, arguments and files that point the program at an endpoint, in rollouts and `polar connect`. They grant
    no permissions."""

    env: Mapping[str, str]
    """Environment variables. One of them must have the value "{api_key}", because the key is passed in the environment
    only. An `intercepted` harness needs no such variable."""
    arguments: Words = ()
    """First arguments of the program."""
    settings: Settings = Field(default_factory=dict)
    """Settings files: path relative to HOME -> content. The path ends in .json, .toml or .yaml; .yaml files are written
    as JSON."""
    unset: Words = ()
    note: str = ""


class RunTable(_Table):
    """How to start the program on a task, without a person who answers its questions."""

    command: Words = Field(min_length=1)
    """The command line. {program} stands for the program, {arguments} for the arguments of the connection,
    {instruction} for the task, and {resume} for the words of `resume`."""
    resume: Words = ()
    """Words of the command line that continue the last conversation. Without them the harness cannot resume."""
    env: Mapping[str, str] = Field(default_factory=dict)
    settings: Settings = Field(default_factory=dict)
    """Additions to the settings files of the connection."""
    files: Mapping[str, str] = Field(default_factory=dict)
    """Further files: path relative to HOME -> text."""
    skills: str = ""
    """Folder, relative to HOME, in which the program looks for skills."""


class LimitTable(_Table):
    """A limit at which the program ends a run; such a run counts as successful."""

    code: int
    name: str
    pattern: Regex = ""


class ExitTable(_Table):
    """Rules by which the outcome of a run is read from the program's exit code and output."""

    limits: tuple[LimitTable, ...] = ()
    failed: Regex = ""
    """Regular expression of output that shows a failure although the exit code is 0; `^` and `$` match at each line."""
    errors: Words = ()
    """Beginnings of the output lines that report an error."""


class AcpTable(_Table):
    """How to start the program as an agent of the Agent Client Protocol."""

    command: Words = Field(min_length=1)
    env: Mapping[str, str] = Field(default_factory=dict)


class HarnessDefinition(_Table):
    """The content of a definition file: how to install, connect and start one harness."""

    name: str
    summary: str
    homepage: str = ""
    program: str
    """Name of the program that users start after they have installed the harness themselves."""
    wire_api: WireApi
    features: frozenset[Feature] = frozenset()
    """Features of the program. Allowed: stream, subagents, parallel_tools, reasoning. (The features resume and skills
    follow from the keys of [run].)"""
    runtime: str = "native"
    notes: str = ""
    needs: Words = ()
    """Programs that must be on PATH in the sandbox."""
    intercepted: bool = False
    """True if the harness's endpoint cannot be set. Rollouts then intercept its calls to the provider's own host."""
    install: InstallTable
    connection: ConnectionTable
    run: RunTable | None = None
    """How to start the program; None if it is run over the Agent Client Protocol."""
    acp: AcpTable | None = None
    exit: ExitTable = ExitTable()
    conformance: Mapping[str, Any] = Field(default_factory=dict)
    """Data for `polar conformance`: fields of `HarnessProfile`, such as `tool`, the tool that runs a command, and
    `arguments`, the arguments of this tool."""

    @model_validator(mode="after")
    def check_whole(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError("name: use lower-case letters, digits and single hyphens")
        if "{api_key}" not in self.connection.env.values() and not self.intercepted:
            raise ValueError(
                'connection: env has no variable with the value "{api_key}", so the program would have no key'
            )
        if self.run is None and self.acp is None:
            raise ValueError("[run] or [acp] is missing: there is no command to start")
        for path in _files(self):
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise ValueError(f"{path!r} is not a path below HOME")
        for path in {**self.connection.settings, **(self.run.settings if self.run else {})}:
            if not path.endswith((".json", ".toml", ".yaml")):
                raise ValueError(
                    f"settings: {path!r} must end in .json, .toml or .yaml; put files of other types under run.files"
                )
        for key, text, names in _texts(self):
            if "{mount:" in text:
                raise ValueError(f"{key}: a definition cannot use {{mount:PATH}}, because only install.path is mounted")
            try:
                check_placeholders(text, names)
            except HarnessError as error:
                hint = (
                    "the API key belongs in connection.env only" if "api_key" in placeholder_names(text) else str(error)
                )
                raise ValueError(f"{key}: {hint}") from None
        return self


def read_definition(path: Path) -> HarnessDefinition:
    """Read a definition file. Raises `DefinitionError`, which names the key."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise DefinitionError(f"{path} is not TOML: {error}") from error
    try:
        return HarnessDefinition.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise DefinitionError(f"{path}: {key + ': ' if key else ''}{message}") from None


def _files(definition: HarnessDefinition) -> Iterator[str]:
    yield from definition.connection.settings
    if definition.run is not None:
        yield from (*definition.run.settings, *definition.run.files, definition.run.skills)


def _texts(definition: HarnessDefinition) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield all strings that may hold placeholders, each as a triple: key, text, names of the allowed placeholders."""
    connection, run, acp = definition.connection, definition.run, definition.acp
    yield from _strings("connection.env", connection.env, (*ENDPOINT_NAMES, "api_key"))
    yield from _strings("connection.arguments", connection.arguments, ENDPOINT_NAMES)
    yield from _strings("connection.settings", connection.settings, ENDPOINT_NAMES)
    yield from _strings("install.version_command", definition.install.version_command or (), ("root", "program"))
    if run is not None:
        yield from _strings("run.command", run.command, (*WORDS, *RUN_NAMES))
        for name in ("resume", "env", "settings", "files"):
            yield from _strings(f"run.{name}", getattr(run, name), RUN_NAMES)
    if acp is not None:
        yield from _strings("acp.command", acp.command, ("program", "arguments", *RUN_NAMES))
        yield from _strings("acp.env", acp.env, RUN_NAMES)


def _strings(key: str, value: object, names: Sequence[str]) -> Iterator[tuple[str, str, Sequence[str]]]:
    if isinstance(value, str):
        yield key, value, names
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _strings(f"{key}.{name}", name, names)
            yield from _strings(f"{key}.{name}", item, names)
    elif isinstance(value, Sequence):
        for number, item in enumerate(value):
            yield from _strings(f"{key}[{number}]", item, names)
