"""The notebook of examples/ runs from top to bottom on a recorded database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reading.conftest import Recorded

nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebooks" / "read_runs.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLAR_DB", recorded.url)
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    assert "mini-swe-agent" in texts[0]
    assert "continues" in texts[2] or "root" in texts[2]
    assert "traces," in texts[-1]
