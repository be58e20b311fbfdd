"""Finding the Python that a harness needs, without fetching one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters import InstallError
from harness_adapters.toolkit import python_runtime, python_venv
from harness_adapters.toolkit.python_venv import VenvRecipe
from tests.harness_adapters.test_protocol import no_pip  # noqa: F401  a fixture

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHER = "3.99"


def fake_python(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing on PATH but one folder, and an empty home."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_the_own_python_is_taken_where_it_fits(tmp_path: Path) -> None:
    assert python_runtime.find((OTHER, OWN), tmp_path) == python_runtime.own()


def test_one_that_works_is_found_behind_one_that_does_not(nothing_else: Path) -> None:
    fake_python(nothing_else / "bin", f"python{OTHER}", "echo 'pyenv: command not found' >&2; exit 127")
    managed = nothing_else / "home" / ".pyenv" / "versions" / f"{OTHER}.1" / "bin"
    good = fake_python(managed, f"python{OTHER}", """echo '[[3, 99, 1], "/base"]'""")
    found = python_runtime.find((OTHER,), nothing_else)
    assert found == python_runtime.PythonInterpreter(good, (3, 99, 1), Path("/base"))


def test_another_version_than_its_name_says_is_not_taken(nothing_else: Path) -> None:
    fake_python(nothing_else / "bin", f"python{OTHER}", """echo '[[3, 98, 1], "/base"]'""")
    assert python_runtime.find((OTHER,), nothing_else) is None


def test_none_is_told_with_what_to_install(nothing_else: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_runtime, "_fetch", lambda minor, folder: "error: no route to host")
    with pytest.raises(InstallError, match="no route to host") as caught:
        python_runtime.ensure((OTHER,), nothing_else)
    assert f"Python {OTHER} is needed" in str(caught.value)
    assert f"apt install python{OTHER}-venv" in str(caught.value)


def test_one_that_was_fetched_is_found(nothing_else: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(minor: str, folder: Path) -> str:
        fake_python(folder / f"cpython-{minor}.4-linux" / "bin", f"python{minor}", """echo '[[3, 99, 4], "/base"]'""")
        return ""

    monkeypatch.setattr(python_runtime, "_fetch", fetch)
    assert python_runtime.ensure((OTHER,), nothing_else).version == (3, 99, 4)
    monkeypatch.setattr(python_runtime, "_fetch", lambda minor, folder: pytest.fail("fetched twice"))
    assert python_runtime.ensure((OTHER,), nothing_else).version == (3, 99, 4)


def test_an_environment_of_another_python_shows_its_base_and_is_remade_without_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_pip: list[list[str]],  # noqa: F811
) -> None:
    recipe = VenvRecipe(name="bare", version="1", requirements=(), check=("-c", "import json"), pythons=(OTHER,))
    # The recipe believes that this is another Python.
    monkeypatch.setattr(python_runtime, "ensure", lambda minors, cache_root: python_runtime.own())
    assert recipe.folder(tmp_path) != replace(recipe, pythons=()).folder(tmp_path)
    installed = python_venv.ensure(recipe, tmp_path)
    base = Path(sys.base_prefix)
    assert base.is_relative_to("/usr") or base in installed.mounts
    assert python_venv.is_ready(recipe, tmp_path)
    made = len(no_pip)
    installed.program.unlink()
    installed.program.symlink_to(tmp_path / "removed")
    assert not python_venv.is_ready(recipe, tmp_path)
    assert python_venv.ensure(recipe, tmp_path) == installed
    assert len(no_pip) == 2 * made
