"""Every command line of the documentation is valid, and every link leads somewhere.

tests/docs/test_commands.py runs the commands; here they are only parsed, which needs no process.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from polar_proxy.cli.app import app
from polar_proxy.training.config import GrpoConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
WORD_LIMIT = 20_000
GENERATED_PART = re.compile(r"<!-- (\w+): begin .*?<!-- \1: end -->", re.S)
"""Tables that a program writes into a page."""
GENERATED = {"cli.md", "settings.md", "api.md", "schema.md", "fields.md", "families.md", "harnesses.md"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def polar_commands(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "sh")).splitlines()
    bare = [re.sub(r"^([A-Z_]+=\S+ )+", "", re.sub(r"(^|\s)#.*", "", line).strip()) for line in lines]
    return [line for line in bare if line.startswith("polar ") and "$(" not in line]


def parse_command_line(arguments: list[str]) -> None:
    """Parse as the `polar` program would, down to the last subcommand, without running it."""
    command: Any = get_command(app)
    context = command.make_context("polar", arguments)
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(page, command, id=f"{page.name}: {command}") for page in PAGES for command in polar_commands(page)],
)
def test_command_lines_are_valid(page: Path, command: str) -> None:
    parse_command_line(shlex.split(command.removesuffix(" &"))[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_training_settings_exist(page: Path) -> None:
    for name in re.findall(r"--set ([a-z_]+)", page.read_text()):
        assert name in GrpoConfig.model_fields, f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def defined_names(path: Path) -> set[str]:
    """Return the functions, classes and methods that a module defines, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if hasattr(method, "name")}
    return names


def test_stations_of_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    stations = re.findall(r"`([\w/]+\.py):([\w.]+)`", text)
    assert len(stations) > 20
    for path, name in stations:
        assert name in defined_names(ROOT / "polar_proxy" / path), f"{path}:{name}"
    for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text):
        assert (ROOT / "polar_proxy" / path).exists() or (ROOT / path).exists(), path


def test_pages_stay_short() -> None:
    written = [page for page in PAGES if page.is_relative_to(ROOT / "docs") or page.parent == ROOT]
    texts = {page.name: GENERATED_PART.sub("", page.read_text()) for page in written if page.name not in GENERATED}
    words = {name: len(text.split()) for name, text in texts.items()}
    assert sum(words.values()) <= WORD_LIMIT, words


def test_decisions_stay_few() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text()
    assert 20 <= len(re.findall(r"^\d+\. \*\*", text, re.M)) <= 40
