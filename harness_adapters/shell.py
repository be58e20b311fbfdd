"""Any command line as a harness: ``shell:my-agent --model {model} {instruction}``.

The command is split into words as a POSIX shell does it, and then the placeholders in each word are filled in. So an
instruction with spaces stays within one word, and no shell interprets it. The API key is only in the environment, under
every name that a client may look for. Nothing is installed: the program must be in the sandbox already, or
``{mount:/path}`` mounts the program read-only at the same path.

    shell:{mount:/opt/agent}/bin/agent --api-base {base_url} --key-env {api_key_env} {instruction}
    shell:bash -c 'cd src && exec agent "$POLAR_INSTRUCTION"'
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from harness_adapters.base import (
    HarnessError,
    HarnessInfo,
    Installation,
    InstallError,
    LaunchContext,
    LaunchPlan,
    WireApi,
)
from harness_adapters.toolkit.adapter import BaseHarness
from harness_adapters.toolkit.placeholders import PLACEHOLDER, check_placeholders, fill

_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_OPERATOR = re.compile(r"\d*(?:<|>>?)\S*|&>\S*|\|\|?|&&?|\S*;", re.ASCII)
"""A word that a shell would not pass to the program: a redirection, a pipe or a command separator."""
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_KEY_NAME = "OPENAI_API_KEY"
_CONTEXT_NAMES = ("base_url", "root_url", "model", "instruction", "home", "workdir")
_NAMES = (*_CONTEXT_NAMES, "api_key_env")


class ShellCommand(BaseHarness):
    name = "shell"
    success = "exited with 0"
    info = HarnessInfo(
        homepage="",
        package="none",
        wire_apis=("openai_chat", "openai_responses", "anthropic_messages", "google_generate_content"),
        runtime="the sandbox's own",
        features=frozenset(),
        notes="Give the command: --harness 'shell:my-agent --model {model} {instruction}'. Placeholders: "
        + ", ".join(f"{{{name}}}" for name in _NAMES)
        + ", {mount:/path}; {{ and }} stand for braces. The endpoint is in OPENAI_BASE_URL, ANTHROPIC_BASE_URL, "
        "GOOGLE_GEMINI_BASE_URL; the key is in OPENAI_API_KEY, ANTHROPIC_API_KEY, GEMINI_API_KEY; the task is also in "
        "POLAR_INSTRUCTION. The exit code decides the outcome.",
        version_command=(),
        tested_versions=("any", "any"),
    )

    def __init__(self, command: str = "") -> None:
        self._command = command
        words = command.replace("{mount:", "").replace("}", "").split()
        # A command line has no version; the program's name takes its place.
        self.default_version = PurePosixPath(words[0]).name if words else "-"

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        del cache_root
        if version is not None and version != self.default_version:
            raise InstallError("a command line cannot have a version: its program is run as it is")
        try:
            words = self._words()
        except HarnessError as error:
            raise InstallError(str(error)) from error
        mounts = _mounts(words)
        for path in mounts:
            if not path.is_absolute() or not path.exists():
                raise InstallError(f"{{mount:{path}}}: no such file or folder on this machine; give an absolute path")
        program = Path(fill(words[0], {}))
        return Installation(self.name, self.default_version, Path("/"), program, mounts)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        del cache_root, version
        return True

    def mounted_paths(self) -> tuple[Path, ...]:
        """Return the paths of this machine that the command mounts. Raises `HarnessError` for a malformed command."""
        return _mounts(self._words())

    @property
    def label(self) -> str:
        return self.default_version

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        values = {"api_key_env": _KEY_NAME, **{name: getattr(context, name) for name in _CONTEXT_NAMES}}
        env = {
            "OPENAI_BASE_URL": context.base_url,
            "OPENAI_API_BASE": context.base_url,
            _KEY_NAME: context.api_key,
            "ANTHROPIC_BASE_URL": context.root_url,
            "ANTHROPIC_API_KEY": context.api_key,
            "GOOGLE_GEMINI_BASE_URL": context.root_url,
            "GEMINI_API_KEY": context.api_key,
            "POLAR_MODEL": context.model,
            "POLAR_INSTRUCTION": context.instruction,
        }
        argv = tuple(fill(word, values) for word in self._words())
        return LaunchPlan(argv=argv, env=env)

    def _words(self) -> list[str]:
        """Return the command's words. Raises `HarnessError` for a command that cannot be run."""
        try:
            words = shlex.split(self._command)
        except ValueError as error:
            raise HarnessError(f"the command after `shell:` cannot be split into words ({error})") from error
        if (operator := _find_operator(self._command)) is not None:
            raise HarnessError(
                f"the command after `shell:` contains {operator}, but no shell reads this command, so the program "
                f"would get {operator} as an argument. Write shell:bash -c 'COMMAND', with \"$POLAR_INSTRUCTION\" in "
                f"COMMAND for the task; or put {operator} in quotes if the program should get it"
            )
        if not words:
            raise HarnessError("the command is missing: --harness 'shell:my-agent --model {model} {instruction}'")
        for word in words:
            check_placeholders(word, (*_NAMES, "mount:/path"))
        program = PurePosixPath(words[0]).name
        if program in _SHELLS and any("{instruction}" in word and word != "{instruction}" for word in words):
            raise HarnessError(
                f"{program} would run the text of the instruction as commands: "
                'use "$POLAR_INSTRUCTION" inside the script instead of {instruction}'
            )
        return words


def _find_operator(command: str) -> str | None:
    """Return the first unquoted word that only a shell understands, such as `>` or `&&`."""
    words = _QUOTED.sub("_", command).split()
    return next((word for word in words if _OPERATOR.fullmatch(word)), None)


def _mounts(words: Iterable[str]) -> tuple[Path, ...]:
    return tuple(Path(found["path"]) for word in words for found in PLACEHOLDER.finditer(word) if found["path"])
