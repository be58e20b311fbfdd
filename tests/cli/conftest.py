"""Commands run in an empty folder, with a new Polar home."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_proxy.cli import output


@pytest.fixture(autouse=True)
def working_directory(polar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for console in (output.out, output.err):  # they may have been made before COLUMNS was set
        monkeypatch.setattr(console, "width", 200)
    return tmp_path
