"""Hostile requests and callback URLs (`benchmarks/_attacks/hostile_rows.py`): each is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._attacks.hostile_rows import Attack, api_attacks, callback_attacks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("attack", [*api_attacks(), *callback_attacks()], ids=lambda attack: attack[0])
async def test_hostile_requests_are_refused(attack: Attack, tmp_path: Path) -> None:
    _, _, honest, send = attack
    reached, got = await send(tmp_path, tmp_path / "ran")
    assert reached == honest, got
