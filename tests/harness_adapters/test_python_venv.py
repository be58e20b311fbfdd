"""Cached virtual environments, and the search for the Python that a harness needs. Nothing is fetched."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters import InstallError
from harness_adapters.toolkit import python_runtime
from harness_adapters.toolkit.python_runtime import PythonInterpreter, ensure_python, find_python, own_python
from harness_adapters.toolkit.python_venv import VenvRecipe

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHER = "3.99"
# Without requirements the environment needs no package index.
BARE = VenvRecipe(name="bare", version="1", requirements=(), check=("-c", "import json"))


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
    folder = BARE.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "left over").write_text("from a killed installer")
    BARE.install(tmp_path)
    assert not (folder / "left over").exists()
    assert pip_steps


def test_failed_install_explains_and_leaves_nothing(tmp_path: Path, pip_steps: list[list[str]]) -> None:
    broken = replace(BARE, check=("-c", "raise SystemExit('the wheel is square')"))
    with pytest.raises(InstallError, match="could not start it once: bare 1") as caught:
        broken.install(tmp_path)
    assert "the wheel is square" in str(caught.value)
    assert not broken.folder(tmp_path).exists()
    assert pip_steps


def test_recipe_change_gives_another_folder(tmp_path: Path) -> None:
    assert BARE.folder(tmp_path) != replace(BARE, requirements=("mcp",)).folder(tmp_path)


def test_own_python_comes_first(tmp_path: Path) -> None:
    assert find_python((OTHER, OWN), tmp_path) == own_python()


def test_find_python_skips_one_that_does_not_start(empty_machine: Path) -> None:
    fake_python(empty_machine / "bin", f"python{OTHER}", "echo 'pyenv: command not found' >&2; exit 127")
    managed = empty_machine / "home" / ".pyenv" / "versions" / f"{OTHER}.1" / "bin"
    good = fake_python(managed, f"python{OTHER}", """echo '[[3, 99, 1], "/base"]'""")
    assert find_python((OTHER,), empty_machine) == PythonInterpreter(good, (3, 99, 1), Path("/base"))


def test_find_python_checks_the_version(empty_machine: Path) -> None:
    fake_python(empty_machine / "bin", f"python{OTHER}", """echo '[[3, 98, 1], "/base"]'""")
    assert find_python((OTHER,), empty_machine) is None


def test_missing_python_error_says_what_to_install(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_runtime, "_fetch", lambda minor, folder: "error: no route to host")
    with pytest.raises(InstallError, match="no route to host") as caught:
        ensure_python((OTHER,), empty_machine)
    assert f"Python {OTHER} is needed" in str(caught.value)
    assert f"apt install python{OTHER}-venv" in str(caught.value)


def test_fetched_python_is_found_again(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(minor: str, folder: Path) -> str:
        fake_python(folder / f"cpython-{minor}.4-linux" / "bin", f"python{minor}", """echo '[[3, 99, 4], "/base"]'""")
        return ""

    monkeypatch.setattr(python_runtime, "_fetch", fetch)
    assert ensure_python((OTHER,), empty_machine).version == (3, 99, 4)
    monkeypatch.setattr(python_runtime, "_fetch", lambda minor, folder: pytest.fail("fetched twice"))
    assert ensure_python((OTHER,), empty_machine).version == (3, 99, 4)


def test_environment_of_another_python_mounts_its_base_and_is_rebuilt_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip_steps: list[list[str]]
) -> None:
    recipe = replace(BARE, pythons=(OTHER,))
    monkeypatch.setattr(python_runtime, "ensure_python", lambda minors, cache_root: own_python())
    assert recipe.folder(tmp_path) != BARE.folder(tmp_path)
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
