"""Cached virtual environments, and the search for the Python that a harness needs. Nothing is fetched."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters.base import (
    Connection,
    Endpoint,
    Installation,
    InstallError,
    LaunchContext,
    LaunchPlan,
    WireApi,
)
from harness_adapters.mini_swe_agent import MiniSweAgent
from harness_adapters.toolkit import cache, python_venv
from harness_adapters.toolkit.python_venv import OWN_MINOR, VenvHarness, ensure_python, find_python

OTHER = "3.99"


class Bare(VenvHarness):
    """A Python harness whose environment needs no package index: pip is a fake."""

    name = "bare"
    default_version = "1"
    info = replace(MiniSweAgent.info, package="pypi:bare")
    imports = "json"

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        raise NotImplementedError

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        raise NotImplementedError


def bare(**changes: object) -> Bare:
    """Return the harness with other attributes."""
    return type("Changed", (Bare,), changes)()


BARE = Bare()


def fake_python(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with one folder on PATH and an empty home."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_installs_an_environment_once(tmp_path: Path, pip_steps: list[list[str]]) -> None:
    assert not BARE.is_installed(tmp_path)
    first = BARE.install(tmp_path)
    count = len(pip_steps)
    assert BARE.is_installed(tmp_path)
    assert BARE.install(tmp_path) == first
    assert len(pip_steps) == count
    assert first.program.exists()
    assert first.root in first.mounts
    assert all(not mount.is_relative_to("/usr") for mount in first.mounts)
    assert Path(sys.base_prefix).is_relative_to("/usr") or Path(sys.base_prefix) in first.mounts


def test_concurrent_installers_make_one_environment(tmp_path: Path, pip_steps: list[list[str]]) -> None:
    threads = [threading.Thread(target=BARE.install, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("venv" in argv for argv in pip_steps) == 1


def test_replaces_an_incomplete_environment(tmp_path: Path, pip_steps: list[list[str]]) -> None:
    folder = BARE.folder(tmp_path, "1")
    folder.mkdir(parents=True)
    (folder / "left over").write_text("from a killed installer")
    BARE.install(tmp_path)
    assert not (folder / "left over").exists()
    assert pip_steps


def test_failed_install_explains_and_leaves_nothing(tmp_path: Path, pip_steps: list[list[str]]) -> None:
    broken = bare(imports="json; raise SystemExit('the wheel is square')")
    with pytest.raises(InstallError, match="could not start it once: bare 1") as caught:
        broken.install(tmp_path)
    assert "the wheel is square" in str(caught.value)
    assert not broken.folder(tmp_path, "1").exists()
    assert pip_steps


def test_recipe_change_gives_another_folder(tmp_path: Path) -> None:
    assert BARE.folder(tmp_path, "1") != bare(extra_requirements=("mcp",)).folder(tmp_path, "1")


def test_own_python_comes_first(tmp_path: Path) -> None:
    assert find_python((OTHER, OWN_MINOR), tmp_path) == Path(sys.executable)


def test_find_python_skips_one_that_does_not_start(empty_machine: Path) -> None:
    fake_python(empty_machine / "bin", f"python{OTHER}", "echo 'pyenv: command not found' >&2; exit 127")
    managed = empty_machine / "home" / ".pyenv" / "versions" / f"{OTHER}.1" / "bin"
    good = fake_python(managed, f"python{OTHER}", f"echo {OTHER}")
    assert find_python((OTHER,), empty_machine) == good


def test_find_python_checks_the_version(empty_machine: Path) -> None:
    fake_python(empty_machine / "bin", f"python{OTHER}", "echo 3.98")
    assert find_python((OTHER,), empty_machine) is None


def test_missing_python_error_says_what_to_install(empty_machine: Path) -> None:
    script = "echo 'error: no route to host' >&2; exit 1"
    fake_python(empty_machine / ".python" / "uv" / "bin", "uv", script)
    with pytest.raises(InstallError, match="no route to host") as caught:
        ensure_python((OTHER,), empty_machine)
    assert f"Python {OTHER} is needed" in str(caught.value)
    assert f"apt install python{OTHER}-venv" in str(caught.value)


def test_fetched_python_is_found_again(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = empty_machine / ".python" / f"cpython-{OTHER}.4-linux" / "bin"

    def run_step(what: str, argv: list[str], **options: object) -> None:
        if argv[0].endswith("uv"):
            fake_python(fetched, f"python{OTHER}", f"echo {OTHER}")

    monkeypatch.setattr(cache, "run_step", run_step)
    assert ensure_python((OTHER,), empty_machine) == fetched / f"python{OTHER}"
    monkeypatch.setattr(cache, "run_step", lambda *args, **options: pytest.fail("fetched twice"))
    assert ensure_python((OTHER,), empty_machine) == fetched / f"python{OTHER}"


def test_environment_of_another_python_mounts_its_base_and_is_rebuilt_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip_steps: list[list[str]]
) -> None:
    recipe = bare(pythons=(OTHER,))
    monkeypatch.setattr(python_venv, "ensure_python", lambda minors, cache_root: Path(sys.executable))
    assert recipe.folder(tmp_path, "1") != BARE.folder(tmp_path, "1")
    installed = recipe.install(tmp_path)
    base = Path(sys.base_prefix)
    assert base.is_relative_to("/usr") or base in installed.mounts
    assert recipe.is_installed(tmp_path)
    count = len(pip_steps)
    installed.program.unlink()
    installed.program.symlink_to(tmp_path / "removed")
    assert not recipe.is_installed(tmp_path)
    assert recipe.install(tmp_path) == installed
    assert len(pip_steps) == 2 * count
