"""The Python code of this machine that untrusted data may refer to.

Rows of tasks, requests, archives and stored rollouts are untrusted data. Some of them refer to Python
code: evaluators, log parsers, task sources and agents, each by a name `module:object`. Such a name is imported only if
the settings or the command line of this process allow exactly that name. Checking a name imports nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from polar_proxy.errors import BadTaskError


@dataclass(frozen=True, slots=True)
class AllowedCode:
    """The names `module:object` that untrusted data may refer to. Made by `Settings.code`."""

    names: frozenset[str] = frozenset()

    def including(self, *names: str) -> AllowedCode:
        return AllowedCode(self.names.union(names))

    def check(self, name: str) -> None:
        """Raise `BadTaskError` for a name that is not allowed."""
        if name not in self.names:
            raise BadTaskError(
                f"the code {name} is not allowed here: tasks and requests may refer only to code that this machine's "
                f'settings allow. If you trust it, start with --allow-code {name}, or put allowed_code = ["{name}"] '
                "into polar.toml"
            )

    def load(self, name: str) -> Any:
        """Return the object called ``module:object``. Raises `BadTaskError` if it is not allowed or fails to load."""
        self.check(name)
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name
            raise BadTaskError(f"cannot load {name}: {error}") from error


NO_CODE = AllowedCode()


def is_code(name: str) -> bool:
    """Return whether `name` has the form ``module:object``.

    Names like ``shell:true`` (a command for a sandbox) and ``acp:codex`` (an agent and its protocol) do not count."""
    module, separator, attribute = name.partition(":")
    if module in ("shell", "acp"):
        return False
    return bool(separator) and all(part.isidentifier() for part in (*module.split("."), attribute))
