"""docs/reference/algorithms.md names functions that exist and are tested, and leaves no algorithm out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.training.losses import LOSSES

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\|.*\| `(\w+)\.(\w+)` \|$", re.MULTILINE)


def test_the_table_names_every_algorithm() -> None:
    rows = ROW.findall((ROOT / "docs" / "reference" / "algorithms.md").read_text())
    assert len(rows) >= 30
    tests = "\n".join(path.read_text() for path in (ROOT / "tests" / "training").glob("test_*.py"))
    for module, function in rows:
        assert callable(getattr(importlib.import_module(f"polar_proxy.training.{module}"), function))
        assert f"{function}(" in tests, f"{function} has no test"
    named = {(module, function) for module, function in rows}
    for algorithm in [*ADVANTAGES.values(), *LOSSES.values()]:
        assert (algorithm.__module__.rsplit(".", 1)[1], algorithm.__name__) in named
