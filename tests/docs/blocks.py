"""The fenced blocks of the pages that a user follows, and the shell commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "reference" / "api_examples.md",
    *sorted((ROOT / "examples").glob("*/README.md")),
]
SCRIPTS = {"docs/guide/rollouts.md": "api()", "docs/reference/api_examples.md": ""}
"""Pages whose shell blocks with this text are run as one script by tests/client/test_docs.py."""


@dataclass(frozen=True)
class Block:
    page: str
    """Path in the repository."""
    language: str
    """As after the fence; `indented` for a block without a fence."""
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:60]}"


def read_blocks() -> list[Block]:
    found = []
    for page in PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text()
        found += [Block(name, *one) for one in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]
        rest = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        found += [Block(name, "indented", one) for one in re.findall(r"(?<=\n\n)((?: {4}\S.*\n)+)", rest)]
    return found


BLOCKS = read_blocks()


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@dataclass(frozen=True)
class DocumentedCommand:
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def is_script(block: Block) -> bool:
    """Return whether the block is run with others as one script, not line by line."""
    return block.page in SCRIPTS and SCRIPTS[block.page] in block.text


def commands_of(block: Block) -> list[DocumentedCommand]:
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in block.text.splitlines())
    return [DocumentedCommand(block.page, line) for line in lines if line]


COMMANDS = list(
    dict.fromkeys(
        command
        for block in BLOCKS
        if block.language in ("sh", "indented") and not is_script(block)
        for command in commands_of(block)
    )
)
"""Every line of a shell block that is run by itself."""
