"""The house rules of docs/architecture.md that a machine can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    {"types", "errors"},
    {"rollout_spec", "sequences"},
    {"config", "api_models"},
    {"webhooks"},
    {"dialects", "engines", "store", "rewards", "client"},
    {"sessions", "traces", "tasks"},
    {"gateway"},
    {"rollouts", "conformance"},
    {"training"},
    {"export"},
    {"api"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = sorted(
    path for name in ("polar_proxy", "harness_adapters", "sandboxes") for path in (ROOT / name).rglob("*.py")
)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def room(path: Path) -> str:
    return path.relative_to(ROOT / "polar_proxy").parts[0].removesuffix(".py")


def test_every_room_has_a_floor() -> None:
    rooms = {room(path) for path in SOURCES if path.is_relative_to(ROOT / "polar_proxy")}
    assert rooms - {"__init__", "assets"} == set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    if not path.is_relative_to(ROOT / "polar_proxy"):
        assert not [name for name in imports(path) if name.split(".")[0] == "polar_proxy"]
        return
    here = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ("harness_adapters", "sandboxes"):
            assert here in ("rollouts", "conformance", "training", "cli"), f"{path} imports {name}"
        if parts[0] == "polar_proxy" and len(parts) > 1 and parts[1] in LEVEL and here in LEVEL and parts[1] != here:
            assert LEVEL[parts[1]] < LEVEL[here], f"{path} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if path == ROOT / "polar_proxy" / "config.py" or not path.is_relative_to(ROOT / "polar_proxy"):
        return
    text = path.read_text()
    assert "os.environ" not in text
    assert "os.getenv" not in text


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in long.items() if lines > 600} == {}
