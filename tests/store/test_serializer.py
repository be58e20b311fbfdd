"""What a call costs after the first one of its session: rows for what is new, while the session's chains fit."""

from __future__ import annotations

import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.store.encoding.serializer import CallSerializer
from polar_proxy.types import CallRecord
from tests.conftest import Serve
from tests.factories import call_record

SESSIONS, MESSAGES, MESSAGE_BYTES = 8, 4, 1000


def turns(number: int) -> list[CallRecord]:
    """Return a call of each session with `number` more messages than at first."""
    return [
        call_record(
            f"session-{session}",
            call_id=f"call-{session}-{number}",
            messages=tuple(f"{session} {at} ".encode() * (MESSAGE_BYTES // 4) for at in range(MESSAGES + number)),
            prompt_ids=None,
            tools=None,
        )
        for session in range(SESSIONS)
    ]


@pytest.mark.parametrize(("cache_bytes", "rows"), [(1 << 20, 1), (10_000, MESSAGES + 1)])
def test_a_session_whose_chains_fit_stores_its_new_messages_only(
    cache_bytes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar_proxy.store.encoding.serializer._CACHED_KEYS", 0)
    serializer = CallSerializer(cache_bytes)
    for record in turns(0):
        serializer.mark_stored(serializer.serialize([record]))
    for record in turns(1):
        batch = serializer.serialize([record])
        assert not batch.refused
        assert len(batch.nodes) == rows
        serializer.mark_stored(batch)


async def test_the_gateways_setting_is_the_room_for_chains(serve: Serve, store: Store) -> None:
    """With a constant room of 32 MiB, 500 sessions of 100 turns inserted their whole prompts with each call."""
    async with serve(ScriptedEngine(), cache_mb=100):
        lanes = (store._writer._lane, store._writer._large_lane)
        assert [lane.serializer._chains.maxsize for lane in lanes] == [50 << 20, 50 << 20]
