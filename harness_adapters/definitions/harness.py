"""The harness adapters of definition files: one class for each way to get the harness's program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness_adapters.base import (
    Connection,
    Endpoint,
    ExitOutcome,
    Feature,
    HarnessInfo,
    Installation,
    InstallError,
    LaunchContext,
    LaunchPlan,
    WireApi,
)
from harness_adapters.definitions.schema import HarnessDefinition, read_definition
from harness_adapters.toolkit.adapter import ConnectableHarness, RunLimit, make_launch_plan
from harness_adapters.toolkit.npm import NpmHarness
from harness_adapters.toolkit.placeholders import PLACEHOLDER, fill
from harness_adapters.toolkit.python_venv import VenvHarness

CATALOGUE = Path(__file__).parent.parent / "catalogue"
_MISSING = object()


class DefinedHarness(ConnectableHarness):
    """A harness that a definition file describes. The subclasses get the program from npm, PyPI or a path."""

    def __init__(self, definition: HarnessDefinition) -> None:
        self.definition = definition
        self.name = definition.name
        self.default_version = definition.install.version or "-"
        self.info = _info(definition)
        self.limits = tuple(RunLimit(limit.code, limit.name, limit.pattern) for limit in definition.exit.limits)
        if definition.exit.errors:
            self.error_prefixes = definition.exit.errors
        if definition.run is not None:
            self.skills_folder = definition.run.skills

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        del wire_api  # a definition has one
        table, values = self.definition.connection, _endpoint_values(endpoint)
        return Connection(
            env={name: fill(text, {**values, "api_key": endpoint.api_key}) for name, text in table.env.items()},
            arguments=tuple(_filled_words(table.arguments, values)),
            settings=_fill_value(table.settings, values),
            unset=table.unset,
            note=table.note,
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection, run = self.make_connection(context, wire_api), self.definition.run
        if run is None:
            return make_launch_plan(connection, ())
        values = _run_values(context, installed)
        resume = _filled_words(run.resume, values) if context.resume else []
        groups = {"program": self.command(installed), "arguments": connection.arguments, "resume": resume}
        return make_launch_plan(
            connection,
            _filled_words(run.command, values, groups),
            env={name: fill(text, values) for name, text in run.env.items()},
            settings=_fill_value(run.settings, values),
            files={path: fill(text, values) for path, text in run.files.items()},
        )

    @property
    def speaks_acp(self) -> bool:
        return self.definition.acp is not None

    def make_acp_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        acp = self.definition.acp
        if acp is None:
            return super().make_acp_plan(installed, context, wire_api)
        plan, values = self.make_plan(installed, context, wire_api), _run_values(context, installed)
        connection = self.make_connection(context, wire_api)
        groups = {"program": self.command(installed), "arguments": connection.arguments}
        return replace(
            plan,
            argv=tuple(_filled_words(acp.command, values, groups)),
            env={**plan.env, **{name: fill(text, values) for name, text in acp.env.items()}},
        )

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        failed = self.definition.exit.failed
        if exit_code == 0 and failed and (found := _last_match(failed, stdout_tail)) is not None:
            return "failed", f"{self.name} failed: {found[:400]}"
        return super().interpret(exit_code, stdout_tail)


class DefinedNpmHarness(DefinedHarness, NpmHarness):
    def __init__(self, definition: HarnessDefinition) -> None:
        super().__init__(definition)
        self.entry = definition.install.entry
        self.needs_node = definition.install.node


class DefinedVenvHarness(DefinedHarness, VenvHarness):
    def __init__(self, definition: HarnessDefinition) -> None:
        super().__init__(definition)
        self.imports = definition.install.imports
        self.pythons = definition.install.pythons
        self.extra_requirements = definition.install.extra


class DefinedProgram(DefinedHarness):
    """A harness whose program is on this machine already, as a file or in a folder. Sandboxes mount the program
    unchanged."""

    @property
    def install_command(self) -> tuple[str, ...]:
        return ()

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        del cache_root
        if version is not None and version != self.default_version:
            raise InstallError(
                f"{self.name} is a program of this machine, so only its version {self.default_version} can be used"
            )
        if not self._program.is_file():
            raise InstallError(f"{self._program} does not exist: correct install.path and install.entry")
        root = Path(self.definition.install.path or "/")
        return Installation(self.name, self.default_version, root, self._program, (root,))

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        del cache_root, version
        return self._program.is_file()

    @property
    def _program(self) -> Path:
        return Path(self.definition.install.path or "/") / self.definition.install.entry


def make_harness(definition: HarnessDefinition) -> DefinedHarness:
    install = definition.install
    if install.npm is not None:
        return DefinedNpmHarness(definition)
    return DefinedVenvHarness(definition) if install.pypi is not None else DefinedProgram(definition)


@cache
def catalogue() -> Mapping[str, Path]:
    """Return the definition files of Polar's own harnesses, by the harness's name."""
    return {path.stem: path for path in sorted(CATALOGUE.glob("*.toml"))}


def find_definition(name: str, folder: Path | None) -> Path | None:
    """Return the file that describes a harness: Polar's own, or the user's in `folder`; None if there is none."""
    if (path := catalogue().get(name)) is not None:
        return path
    return user_definitions(folder).get(name)


def user_definitions(folder: Path | None) -> Mapping[str, Path]:
    """Return the definition files that the user has added, by the harness's name."""
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_harness(path: Path) -> DefinedHarness:
    """Return the adapter of a definition file. Raises `DefinitionError`."""
    return make_harness(read_definition(path))


def _info(definition: HarnessDefinition) -> HarnessInfo:
    install, run = definition.install, definition.run
    source = f"npm:{install.npm}" if install.npm else f"pypi:{install.pypi}" if install.pypi else "none"
    derived: set[Feature] = set()
    if run is not None and run.resume:
        derived.add("resume")
    if run is not None and run.skills:
        derived.add("skills")
    start = ("{program}", f"{{root}}/{install.entry}") if install.node else ("{program}",)
    prints_version = (*start, "--version") if install.version else ()
    return HarnessInfo(
        homepage=definition.homepage,
        package=source,
        wire_apis=(definition.wire_api,),
        runtime=definition.runtime,
        features=definition.features | derived,
        notes=definition.notes,
        needs=definition.needs,
        version_command=prints_version if install.version_command is None else install.version_command,
        summary=definition.summary,
        intercepted=definition.intercepted,
        command=definition.program,
    )


def _endpoint_values(endpoint: Endpoint) -> dict[str, object]:
    return {
        "base_url": endpoint.base_url,
        "root_url": endpoint.root_url,
        "model": endpoint.model,
        "home": endpoint.home,
        "context_length": endpoint.context_length,
        "timeout_seconds": endpoint.request_timeout_seconds,
        "timeout_ms": round(endpoint.request_timeout_seconds * 1000),
    }


def _run_values(context: LaunchContext, installed: Installation) -> dict[str, object]:
    return {
        **_endpoint_values(context),
        "instruction": context.instruction,
        "workdir": context.workdir,
        "max_steps": context.max_steps,
        "command_seconds": context.command_timeout_seconds,
        "root": str(installed.root),
    }


def _filled_words(
    words: Sequence[str], values: Mapping[str, object], groups: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Fill in the placeholders of each word. A word such as `{arguments}` names a group of words, and is replaced by
    all words of this group."""
    found: list[str] = []
    for word in words:
        group = (groups or {}).get(word.removeprefix("{").removesuffix("}")) if word.startswith("{") else None
        found += [fill(word, values)] if group is None else group
    return found


def _fill_value(value: Any, values: Mapping[str, object]) -> Any:
    """Fill in the placeholders of all strings in a value. Leave out a key if its value is a single placeholder and this
    placeholder's value is None."""
    if isinstance(value, str):
        whole = PLACEHOLDER.fullmatch(value)
        if whole is not None and whole["name"]:
            return _MISSING if values[whole["name"]] is None else values[whole["name"]]
        return fill(value, values)
    if isinstance(value, Mapping):
        items = ((fill(key, values), _fill_value(item, values)) for key, item in value.items())
        return {key: item for key, item in items if item is not _MISSING}
    if isinstance(value, Sequence):
        return [item for one in value if (item := _fill_value(one, values)) is not _MISSING]
    return value


def _last_match(pattern: str, text: str) -> str | None:
    found = list(re.finditer(pattern, text, re.MULTILINE))
    return found[-1][0] if found else None
