"""The outcome of an attack, and the options that every family of `benchmarks/attacks.py` is run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sandboxes.base import SandboxKind


@dataclass(frozen=True)
class Outcome:
    attack: str
    family: str
    """The module that made the attack: rewards, escapes, gateway or data."""
    where: str
    """Kind of sandbox, kind of task, or listener."""
    reached: bool
    """The attack succeeded; for a control, the honest program got what it should get."""
    got: str
    """One line for a reader: the status, reward, signs or error."""
    control: bool = False
    """True for an honest counterpart, which must succeed, because a defence must not stop honest work."""
    expected: bool = False
    """True if the attack is documented to succeed, for example in a `process` sandbox."""

    @property
    def pays(self) -> bool:
        """Whether an attack succeeded although it must not."""
        return self.reached and not self.control and not self.expected

    @property
    def broken(self) -> bool:
        """Whether an honest counterpart failed."""
        return self.control and not self.reached


@dataclass(frozen=True)
class AttackOptions:
    sandboxes: tuple[SandboxKind, ...]
    """The kinds of sandbox to attack; all of them run here."""
    folder: Path
    """An existing scratch folder of this family alone, removed after the run."""
    report: Callable[[str], None]
    """Writes a line of progress."""
    only: tuple[str, ...] = ()
    """Shell patterns of attacks to run; empty: all."""

    def selected(self, attack: str) -> bool:
        return not self.only or any(fnmatch(attack, pattern) for pattern in self.only)
