"""Every reason for which an export leaves something out has an explanation."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

import polar_proxy
from polar_proxy.export.reasons import CALLS, ROWS, TRACES, explain
from polar_proxy.traces import grades, scoring
from polar_proxy.traces.grades import GRADES, TRAINABLE
from polar_proxy.types import CallStatus

SOURCES = Path(polar_proxy.__file__).parent


def row_reasons() -> set[str]:
    """Return the reason of every RowError that the package raises."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RowError":
                found.add(ast.literal_eval(node.args[0]))
    return found


def test_every_reason_is_explained() -> None:
    assert len(row_reasons()) > 10
    assert row_reasons() <= ROWS.keys()
    assert {f"grade_{grade}" for grade in GRADES if grade not in TRAINABLE} <= TRACES.keys()
    assert set(get_args(CallStatus)) - {"ok"} <= CALLS.keys()
    returned = re.findall(r'return "(\w+)"', inspect.getsource(grades.exclusion_reason))
    documented = re.findall(r"`(\w+)`", (scoring.__doc__ or "").split("Reasons for which an answer is left out:")[1])
    assert set(returned) | set(documented) <= CALLS.keys()
    assert explain("client_gone", 1).startswith("1 left out as client_gone: calls whose agent disconnected")
