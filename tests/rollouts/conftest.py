"""A register of sandboxes for each test, so that its clean-up removes only its own sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_sandbox_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the register of sandboxes, which is below the temporary directory, in the test's own folder."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
