"""Any command line as a harness: ``shell:my-agent --model {model} {instruction}``.

The command is split into words as a POSIX shell would, then the placeholders of each word are filled in; so whatever
the instruction holds, it stays within its word, and no shell reads it. The key is in the environment only, under every
name that a client may look for. Nothing is installed: the program has to be in the sandbox, or is brought in by
``{mount:/path}``, which stands for that path and shows it read-only inside.

    shell:{mount:/opt/agent}/bin/agent --api-base {base_url} --key-env {api_key_env} {instruction}
    shell:bash -c 'cd src && exec agent "$POLAR_INSTRUCTION"'
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from harness_adapters.base import (
    ExitOutcome,
    HarnessError,
    HarnessInfo,
    Installation,
    InstallError,
    LaunchContext,
    LaunchPlan,
    require_supported,
)

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{mount:(?P<path>[^{}]+)\}|\{(?P<name>[a-z_]+)\}")
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_KEY_NAME = "OPENAI_API_KEY"
_NAMES = ("base_url", "root_url", "api_key_env", "model", "instruction", "home", "workdir")


class ShellCommand:
    """Adapter of one command line."""

    name = "shell"
    facts = HarnessInfo(
        homepage="",
        package="none",
        tested_versions=("any", "any"),
        wire_apis=("openai_chat", "openai_responses", "anthropic_messages", "google_generate_content"),
        runtime="the sandbox's own",
        features=frozenset(),
        notes="Give the command: --harness 'shell:my-agent --model {model} {instruction}'. Placeholders: "
        + ", ".join(f"{{{name}}}" for name in _NAMES)
        + ", {mount:/path}; {{ and }} stand for braces. The endpoint is in OPENAI_BASE_URL, ANTHROPIC_BASE_URL, "
        "GOOGLE_GEMINI_BASE_URL and their keys; the task in POLAR_INSTRUCTION as well. Its exit status is believed.",
        version_command=(),
    )

    def __init__(self, command: str = "") -> None:
        self._command = command
        words = command.replace("{mount:", "").replace("}", "").split()
        # A command line has no version; the program's name says which it is.
        self.default_version = PurePosixPath(words[0]).name if words else "-"

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        del cache_root
        if version is not None and version != self.default_version:
            raise InstallError("a command line has no version: what the sandbox holds is run")
        try:
            words = self._words()
        except HarnessError as error:
            raise InstallError(str(error)) from error
        mounts = tuple(Path(found["path"]) for word in words for found in _PLACEHOLDER.finditer(word) if found["path"])
        for path in mounts:
            if not path.is_absolute() or not path.exists():
                raise InstallError(f"{{mount:{path}}} names nothing on this machine; it must be an absolute path")
        program = Path(_filled(words[0], {}))
        return Installation(self.name, self.default_version, Path("/"), program, mounts)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        del cache_root, version
        return True

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        require_supported(self.name, self.facts, context)
        values = {
            "base_url": context.base_url,
            "root_url": context.root_url,
            "api_key_env": _KEY_NAME,
            "model": context.model,
            "instruction": context.instruction,
            "home": context.home,
            "workdir": context.workdir,
        }
        env = {
            "HOME": context.home,
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
        argv = tuple(_filled(word, values) for word in self._words())
        return LaunchPlan(argv=argv, env=env, mounts=installed.mounts)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        program = self.default_version
        if exit_code is None:
            return "timed_out", f"{program} was stopped by the clock"
        if exit_code != 0:
            lines = [line.strip() for line in stdout_tail.splitlines() if line.strip()]
            return "failed", f"{program} exited with {exit_code}: {lines[-1][:400] if lines else 'no output'}"
        return "ok", "exited with 0"

    def _words(self) -> list[str]:
        """The command's words, checked. Raises `HarnessError`."""
        try:
            words = shlex.split(self._command)
        except ValueError as error:
            raise HarnessError(f"the command after shell: cannot be split into words ({error})") from error
        if not words:
            raise HarnessError("the command is missing: --harness 'shell:my-agent --model {model} {instruction}'")
        for word in words:
            for found in _PLACEHOLDER.finditer(word):
                if found["name"] and found["name"] not in _NAMES:
                    known = ", ".join(f"{{{name}}}" for name in (*_NAMES, "mount:/path"))
                    raise HarnessError(f"{found[0]} is no placeholder; there are {known}; write {{{{ for a brace")
        program = PurePosixPath(words[0]).name
        if program in _SHELLS and any("{instruction}" in word and word != "{instruction}" for word in words):
            raise HarnessError(
                f"{program} would run what stands in the instruction: "
                'use "$POLAR_INSTRUCTION" inside the script instead of {instruction}'
            )
        return words


def _filled(word: str, values: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        if found["path"]:
            return found["path"]
        return values.get(found["name"], found[0]) if found["name"] else found[0][0]

    # One pass: what a value holds is not looked at again.
    return _PLACEHOLDER.sub(value, word)
