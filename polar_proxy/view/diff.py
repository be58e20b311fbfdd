"""Parser of patches in unified diff format: lines with their numbers, for the pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_LINES = 4000
"""Maximum number of lines of a patch that are shown. The page links to the whole file."""

_HUNK = re.compile(r"@@ -([0-9]{1,9})(?:,[0-9]+)? \+([0-9]{1,9})(?:,[0-9]+)? @@")
LineKind = Literal["added", "removed", "same", "hunk", "note"]


@dataclass(frozen=True, slots=True)
class DiffLine:
    kind: LineKind
    old: int | None
    new: int | None
    text: str


@dataclass(slots=True)
class DiffFile:
    path: str
    lines: list[DiffLine] = field(default_factory=list)
    added: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class Diff:
    files: Sequence[DiffFile]
    is_cut: bool
    """True if the patch has more lines than are shown."""


def read_diff(text: str) -> Diff:
    """Return the files of a patch that git wrote. Lines that cannot be parsed are kept as notes."""
    # Not splitlines(): a line of an agent may hold other separators, which would begin a line of the patch.
    lines = text.removesuffix("\n").split("\n") if text else []
    files: list[DiffFile] = []
    old = new = 0
    in_hunk = False
    for line in lines[:MAX_LINES]:
        if line.startswith("diff --git "):
            files.append(DiffFile(line.rpartition(" b/")[2]))
            in_hunk = False
            continue
        if not files:
            files.append(DiffFile("patch"))
        file = files[-1]
        if found := _HUNK.match(line):
            old, new, in_hunk = int(found[1]), int(found[2]), True
            file.lines.append(DiffLine("hunk", None, None, line))
        elif not in_hunk:
            if not line.startswith(("--- ", "+++ ", "index ")):
                file.lines.append(DiffLine("note", None, None, line))
        elif line.startswith("+"):
            file.lines.append(DiffLine("added", None, new, line[1:]))
            file.added, new = file.added + 1, new + 1
        elif line.startswith("-"):
            file.lines.append(DiffLine("removed", old, None, line[1:]))
            file.removed, old = file.removed + 1, old + 1
        elif line.startswith("\\"):
            file.lines.append(DiffLine("note", None, None, line))
        else:
            file.lines.append(DiffLine("same", old, new, line[1:]))
            old, new = old + 1, new + 1
    return Diff(files, len(lines) > MAX_LINES)
