"""Placeholders such as `{model}` in the words of a command line and in the texts of a definition file.

A placeholder is replaced by the value of its name; a name has only lower-case letters and underscores. `{mount:/path}`
is replaced by `/path`, a path of this machine that the sandbox mounts. `{{` and `}}` stand for braces. All other braces
stay as they are. A placeholder inside an inserted value is not filled in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from harness_adapters.base import HarnessError

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{mount:(?P<path>[^{}]+)\}|\{(?P<name>[a-z_]+)\}")


def fill(word: str, values: Mapping[str, object]) -> str:
    def value(found: re.Match[str]) -> str:
        if found["path"]:
            return found["path"]
        return _text(values.get(found["name"], found[0])) if found["name"] else found[0][0]

    return PLACEHOLDER.sub(value, word)


def placeholder_names(word: str) -> Iterator[str]:
    return (found["name"] for found in PLACEHOLDER.finditer(word) if found["name"])


def check_placeholders(word: str, known: Collection[str]) -> None:
    """Raise `HarnessError` for a placeholder that is not in `known`."""
    for name in placeholder_names(word):
        if name not in known:
            names = ", ".join(f"{{{one}}}" for one in known)
            raise HarnessError(f"{{{name}}} is not a placeholder; use one of {names}, or write {{{{ for a brace")


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
