"""Hostile rows and Harbor folders (`benchmarks/_attacks/hostile_rows.py`): each is refused, and nothing is run.

An audit hook watches all that reading them does: no program is started and no module of a row is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._attacks.hostile_rows import ROWS, Attack, folder_attacks, row_attacks

_PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn"}
_seen: list[str] | None = None
"""What the hook has seen. A hook cannot be removed, so it only watches while this is a list."""


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and event in _PROGRAMS:
        _seen.append(f"{event} {arguments[0]}")
    if _seen is not None and event == "import" and str(arguments[0]).startswith("polar_attack"):
        _seen.append(f"import {arguments[0]}")


sys.addaudithook(_watch)


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """The programs that were started and the modules of rows that were imported during a test."""
    global _seen
    _seen = []
    yield _seen
    _seen = None


@pytest.mark.parametrize("attack", [*row_attacks(ROWS), *folder_attacks()], ids=lambda attack: attack[0])
async def test_hostile_data_is_refused_and_runs_nothing(attack: Attack, tmp_path: Path, ran: list[str]) -> None:
    _, _, honest, read = attack
    marker = tmp_path / "ran"
    (tmp_path / "work").mkdir()
    reached, got = await read(tmp_path / "work", marker)
    assert reached == honest, got
    assert ran == []
    assert not marker.exists()
