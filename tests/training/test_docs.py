"""docs/algorithms.md names what there is: functions that can be imported, tests that exist, no algorithm left out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.training.losses import LOSSES

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\|.*\| `(\w+)\.(\w+)` \| `(\w+)` \|$", re.MULTILINE)


def test_the_table_is_true() -> None:
    rows = ROW.findall((ROOT / "docs" / "algorithms.md").read_text())
    assert len(rows) >= 30
    tests = "\n".join(path.read_text() for path in (ROOT / "tests" / "training").glob("test_*.py"))
    for module, function, test in rows:
        assert callable(getattr(importlib.import_module(f"polar_proxy.training.{module}"), function))
        assert f"def {test}(" in tests
    named = {(module, function) for module, function, _ in rows}
    for algorithm in [*ADVANTAGES.values(), *LOSSES.values()]:
        assert (algorithm.__module__.rsplit(".", 1)[1], algorithm.__name__) in named
