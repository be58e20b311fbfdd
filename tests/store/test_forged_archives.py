"""Forged archives (`benchmarks/_attacks/forged_archives.py`): each is refused, or imported without any harm."""

from __future__ import annotations

import asyncio
import resource
import zlib
from pathlib import Path

import pytest

from benchmarks._attacks.forged_archives import (
    FORGERIES,
    Forgery,
    HonestArchives,
    archive_damage,
    make_honest_archives,
)
from polar_proxy.errors import StoreError
from polar_proxy.store import open_store
from polar_proxy.store.encoding.cells import CellCodec

pytestmark = pytest.mark.slow

_LARGE = {"artifact_of_3_gib", "database_of_2_gib", "message_of_1_gib"}
"""Forgeries that take long to make."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> HonestArchives:
    return asyncio.run(make_honest_archives(tmp_path_factory.mktemp("honest")))


@pytest.mark.parametrize("forgery", [one for one in FORGERIES if one.name not in _LARGE], ids=lambda one: one.name)
async def test_a_forged_archive_does_no_harm(forgery: Forgery, honest: HonestArchives, tmp_path: Path) -> None:
    damage, got = await archive_damage(forgery, honest, tmp_path)
    assert damage is None, got
    assert (got == "imported") == (forgery.control or forgery.harmless), got


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("forgery", [one for one in FORGERIES if one.name in _LARGE], ids=lambda one: one.name)
async def test_an_archive_bomb_takes_little_memory(forgery: Forgery, honest: HonestArchives, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    damage, got = await archive_damage(forgery, honest, tmp_path)
    assert damage is None, got
    assert got.startswith("refused")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


async def test_what_had_not_ended_arrives_as_cancelled(honest: HonestArchives, tmp_path: Path) -> None:
    (queued,) = (one for one in FORGERIES if one.name == "queued_rollout_with_shell")
    assert await archive_damage(queued, honest, tmp_path) == (None, "imported")
    async with open_store(str(tmp_path / "ours" / "polar.db")) as store:
        (row,) = [row for row in await store.rollouts.find() if row.cause == "imported"]
        assert (row.status, row.job_id) == ("cancelled", None)


def test_a_stored_value_unpacks_to_no_more_than_it_may() -> None:
    codec = CellCodec()
    cell = codec.pack_bytes(b"x" * 15_000, b"y" * 100)
    assert codec.unpack_bytes(cell, b"y" * 100) == b"x" * 15_000
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = cell[:1] + bytes([cell[1] & ~0x80 | 0x40]) + packer.compress(bytes(10_000_000)) + packer.flush()
    with pytest.raises(StoreError, match="longer than any"):
        codec.unpack_bytes(bomb)
