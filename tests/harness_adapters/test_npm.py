"""npm harnesses: their cache, the shared Node.js, exit codes and config files. npm and pip are fakes."""

from __future__ import annotations

import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters.base import (
    Connection,
    Endpoint,
    HarnessError,
    Installation,
    InstallError,
    LaunchContext,
    LaunchPlan,
    McpServer,
    Skill,
    WireApi,
)
from harness_adapters.codex import Codex
from harness_adapters.qwen_code import QwenCode
from harness_adapters.toolkit import cache, npm
from harness_adapters.toolkit.adapter import skill_files, toml_text
from harness_adapters.toolkit.npm import NodeRuntime, NpmHarness


class Tiny(NpmHarness):
    """An npm harness with a native program."""

    name = "tiny"
    default_version = "1.2.3"
    entry = "node_modules/@x/*/bin/tiny"
    info = replace(Codex.info, package="npm:@x/tiny")

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        raise NotImplementedError

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        raise NotImplementedError


def tiny(**changes: object) -> Tiny:
    """Return the harness with other attributes."""
    return type("Changed", (Tiny,), changes)()


TINY = Tiny()


def npm_installs(steps: list[list[str]]) -> int:
    return sum("--prefix" in argv for argv in steps)


def test_installs_a_native_program_once(tmp_path: Path, npm_steps: list[list[str]]) -> None:
    assert not TINY.is_installed(tmp_path)
    first = TINY.install(tmp_path)
    assert TINY.is_installed(tmp_path)
    assert TINY.install(tmp_path) == first
    assert npm_installs(npm_steps) == 1
    assert first.program == first.root / "node_modules/@x/tiny-linux/bin/tiny"
    assert first.mounts == (first.root,)
    assert first.root.parent == tmp_path / "tiny"
    assert first.root.name.startswith("1.2.3-")


def test_a_script_brings_its_node(tmp_path: Path, npm_steps: list[list[str]]) -> None:
    harness = tiny(needs_node=True)
    installed = harness.install(tmp_path)
    node = NodeRuntime.at(tmp_path)
    assert installed.program == node.program
    assert installed.mounts == (installed.root, node.root)
    assert not (node.root / "venv").exists()
    (node.root / ".complete").unlink()
    assert not harness.is_installed(tmp_path)
    assert TINY.is_installed(tmp_path)
    assert npm_steps


def test_harnesses_share_one_node(tmp_path: Path, npm_steps: list[list[str]]) -> None:
    TINY.install(tmp_path)
    tiny(name="other").install(tmp_path)
    assert sum("--target" in argv for argv in npm_steps) == 1


def test_concurrent_installers_make_one_folder(tmp_path: Path, npm_steps: list[list[str]]) -> None:
    threads = [threading.Thread(target=TINY.install, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert npm_installs(npm_steps) == 1


def test_replaces_an_incomplete_folder(tmp_path: Path, npm_steps: list[list[str]]) -> None:
    folder = TINY.folder(tmp_path, "1.2.3")
    folder.mkdir(parents=True)
    (folder / "left over").write_text("from a killed installer")
    TINY.install(tmp_path)
    assert not (folder / "left over").exists()
    assert npm_steps


def test_a_package_without_its_program_leaves_nothing(tmp_path: Path, npm_steps: list[list[str]]) -> None:
    harness = tiny(entry="node_modules/@x/*/bin/other")
    with pytest.raises(InstallError, match="does not support this system"):
        harness.install(tmp_path)
    assert not harness.folder(tmp_path, "1.2.3").exists()
    assert npm_steps


def test_failed_step_quotes_the_end_of_its_output(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('x' * 9000); print('the registry is out'); raise SystemExit(7)"]
    with pytest.raises(InstallError, match=r"could not install it \(exit code 7\)") as caught:
        cache.run_step("install it", argv, advice="Try again.")
    assert "the registry is out" in str(caught.value)
    assert str(caught.value).endswith("Try again.")
    assert len(str(caught.value)) < 3000
    with pytest.raises(InstallError, match="could not start it"):
        cache.run_step("start it", [str(tmp_path / "nothing")], advice="Try again.")


def test_a_step_that_hangs_is_killed() -> None:
    with pytest.raises(InstallError, match=r"could not fetch it: it did not end within 0\.2 s\.\nTry again"):
        cache.run_step("fetch it", ["sleep", "60"], advice="Try again.", seconds=0.2)


def test_recipe_change_gives_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [TINY.folder(tmp_path, "1.2.3"), TINY.folder(tmp_path, "2")]
    folders += [tiny(info=replace(Codex.info, package="npm:tiny")).folder(tmp_path, "1.2.3")]
    monkeypatch.setattr(npm, "NODE_VERSION", "24.0.0")
    folders += [TINY.folder(tmp_path, "1.2.3")]
    assert len(set(folders)) == 4


@pytest.mark.parametrize(
    ("code", "tail", "expected"),
    [
        (0, "All done.\n", ("ok", "finished")),
        (1, "stream error\n\nERROR: no\n", ("failed", "codex exited with 1: ERROR: no")),
        (-9, "", ("failed", "codex exited with -9: no output")),
        (None, "x", ("timed_out", "codex was stopped at its time limit")),
    ],
)
def test_interpret_codex(code: int | None, tail: str, expected: tuple[str, str]) -> None:
    assert Codex().interpret(code, tail) == expected


def test_a_turn_limit_is_not_a_failure() -> None:
    assert QwenCode().interpret(53, "Reached max session turns") == ("ok", "ended by its turn limit")


def test_toml_text_round_trip() -> None:
    table = {
        "text": 'a "quoted" \\ line\n\ttab \x7f \x01 ü 😀',
        "yes": True,
        "number": 5,
        "share": 0.5,
        "list": ["a", "b"],
        "deep": {"a b": {"x": "y"}, "z": "plain value after a table", "é": 1},
        "empty": {},
    }
    assert tomllib.loads(toml_text(table)) == table


@pytest.mark.parametrize("name", ["../up", "Big", "a/b", "", "a--b"])
def test_skill_files_reject_names_that_leave_the_folder(name: str) -> None:
    with pytest.raises(HarnessError, match="invalid skill name"):
        skill_files("skills", [Skill(name, "text")])


def test_an_mcp_server_needs_a_command_or_a_url() -> None:
    with pytest.raises(HarnessError, match="neither a command nor a url"):
        McpServer("empty")
