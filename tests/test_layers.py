"""The rules of docs/architecture.md that a program can check: layers, unique class names, private names, settings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import LONG_FILES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("polar_proxy", "harness_adapters", "sandboxes")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))

LAYERS = [
    {"provider_calls"},
    {"types", "errors", "terminal", "temporary", "atomic_file", "offload", "memory", "fast_fields", "documented"},
    {"rollout_spec", "sequences", "message_text", "token_scale", "allowed_code", "clean_git", "prices"},
    {"config", "api_models"},
    {"webhooks", "intercept"},
    {"dialects", "engines", "store", "rewards", "client"},
    {"sessions", "traces", "tasks"},
    {"gateway", "telemetry"},
    {"rollouts", "conformance"},
    {"training"},
    {"export"},
    {"records", "reading"},
    {"api"},
    {"view"},
    {"cli"},
]
"""Parts of `polar_proxy`, lowest layer first. A part imports only from lower layers."""

LAYER_OF = {part: level for level, parts in enumerate(LAYERS) for part in parts}
USERS_OF_AGENTS_AND_SANDBOXES = ("temporary", "intercept", "rollouts", "conformance", "training", "cli")


@cache
def imports_and_classes(path: Path) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]


def imported_modules(path: Path) -> Iterator[str]:
    for node in imports_and_classes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    for node in imports_and_classes(path):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "polar_proxy").parts[0].removesuffix(".py")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in SOURCES if path.is_relative_to(ROOT / "polar_proxy")}
    assert parts - {"__init__", "assets"} == set(LAYER_OF)


def upward_imports(path: Path) -> Iterator[str]:
    """Yield what a file imports from its own or a higher layer, or from packages that its layer must not use."""
    if not path.is_relative_to(ROOT / "polar_proxy"):
        yield from (name for name in imported_modules(path) if name.split(".")[0] == "polar_proxy")
        return
    here = part_of(path)
    for name in imported_modules(path):
        package, _, rest = name.partition(".")
        part = rest.split(".")[0]
        if package in ("harness_adapters", "sandboxes") and here not in USERS_OF_AGENTS_AND_SANDBOXES:
            yield name
        if package == "polar_proxy" and part != here and LAYER_OF.get(part, -1) >= LAYER_OF.get(here, len(LAYERS)):
            yield name


def test_imports_run_downwards() -> None:
    assert [f"{relative(path)} imports {name}" for path in SOURCES for name in upward_imports(path)] == []


def private_imports(path: Path) -> Iterator[str]:
    """Yield private names of other modules that a file imports. A private module belongs to its package."""
    here = module_name(path)
    for module, name in imported_names(path):
        if module.split(".")[0] not in PACKAGES:
            continue
        private = [part for part in (*module.split("."), name) if part.startswith("_") and not part.startswith("__")]
        owner = module.split("._")[0] if "._" in module else None
        if private and (owner is None or not here.startswith(owner)):
            yield f"{module}.{name}"


def test_private_names_stay_in_their_module() -> None:
    assert [f"{relative(path)} imports {name}" for path in SOURCES for name in private_imports(path)] == []


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for node in imports_and_classes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{relative(path)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_only_config_reads_the_environment() -> None:
    readers = [
        relative(path)
        for path in SOURCES
        if path.is_relative_to(ROOT / "polar_proxy")
        and "test_runner" not in path.parts  # it runs in a sandbox
        and re.search(r"os\.(environ|getenv)", path.read_text())
    ]
    assert readers == ["polar_proxy/config.py"]


def test_files_have_at_most_500_lines() -> None:
    """Migrations list a whole schema and are exempt."""
    lines = {relative(path): len(path.read_text().splitlines()) for path in SOURCES if "versions" not in path.parts}
    long = {name: number for name, number in lines.items() if number > 500}
    assert long == {}


def test_the_files_that_start_first_exist() -> None:
    assert [name for name in LONG_FILES if not (ROOT / "tests" / name).is_file()] == []
