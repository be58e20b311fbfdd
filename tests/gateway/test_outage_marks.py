"""A session that lost a call stays incomplete, also if its gateway is killed before the store can be written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store, open_store
from polar_proxy.store.repositories.outage_marks import OutageMark, OutageMarks
from tests.conftest import Serve
from tests.fakes.store_faults import away
from tests.gateway.agents import CHAT, client, new_session, until_ready
from tests.gateway.shared_gateways import run_killable_gateway
from tests.gateway.test_real_outages import fill, small_disk

pytestmark = pytest.mark.slow
__all__ = ["small_disk"]


async def test_a_killed_gateway_leaves_its_marks(tmp_path: Path) -> None:
    """Of a session that was stored, of one whose key is unknown, and of one that was found only by its key."""
    file = str(tmp_path / "polar.db")
    async with open_store(file) as store:
        known = await new_session(store, "known")
    async with run_killable_gateway(file, "away", program="unrecording_gateway") as (process, port):
        for key in ("known", "new"):
            async with client(f"http://127.0.0.1:{port}", key) as http:
                for _ in range(3):
                    answer = await http.post("/chat/completions", json=CHAT)
                    assert answer.status_code == 200
        async with open_store(file) as store:  # the gateway lives, and will write its marks itself
            assert not await store.sessions.is_incomplete(known)
        process.kill()
        await process.wait()
    async with open_store(file) as store:
        assert await store.sessions.is_incomplete(known)
        row = await store.sessions.by_key(hash_key("new"))
        assert row is not None
        assert (row.session_id, row.incomplete) == (answer.headers["x-polar-session-id"], "unrecorded_calls")
    assert list((tmp_path / "unrecorded").iterdir()) == []


@pytest.mark.full
async def test_a_full_disk_has_room_for_marks(small_disk: Path) -> None:
    file = str(small_disk / "polar.db")
    async with open_store(file) as store:
        session_id = await new_session(store, "own")
    async with run_killable_gateway(file, program="unrecording_gateway") as (process, port):
        fill(small_disk / "ballast")
        text = "\n".join(map(str, range(20_000)))
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        async with client(f"http://127.0.0.1:{port}", "own") as http:
            for _ in range(6):
                assert (await http.post("/chat/completions", json=body)).status_code == 200
        process.kill()
        await process.wait()
    (small_disk / "ballast").unlink()
    async with open_store(file) as store:
        assert await store.sessions.is_incomplete(session_id)


async def test_a_gateway_that_stops_during_an_outage_leaves_its_marks(
    serve: Serve, store: Store, tmp_path: Path
) -> None:
    session_id = await new_session(store, "own")
    with away(store):
        async with serve(ScriptedEngine()) as gateway, client(gateway.url, "own") as http:
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
    assert not await store.sessions.is_incomplete(session_id)
    async with open_store(store.display_url) as again:
        assert await again.sessions.is_incomplete(session_id)


async def test_nothing_is_left_after_an_outage_that_ended(serve: Serve, store: Store, tmp_path: Path) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url, "own") as http:
        with away(store):
            assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        await until_ready(http, gateway)
    assert list((tmp_path / "unrecorded").iterdir()) == []


def test_marks_of_living_processes_and_of_other_databases_are_left_alone(tmp_path: Path) -> None:
    one, other, elsewhere = (OutageMarks(tmp_path, name) for name in ("a", "a", "b"))
    marks = {OutageMark("sess_1", None), OutageMark("sess_2", bytes(32))}
    for mark in [*marks, *marks]:
        one.add(mark)
    assert list(other.of_dead_processes()) == []
    one.close()
    assert list(elsewhere.of_dead_processes()) == []
    assert [set(found) for found in other.of_dead_processes()] == [marks]
    assert list(other.of_dead_processes()) == []


def test_cleared_marks_are_gone(tmp_path: Path) -> None:
    marks = OutageMarks(tmp_path, "a")
    marks.add(OutageMark("sess_1", None))
    marks.clear()
    marks.add(OutageMark("sess_2", None))
    marks.close()
    assert list(OutageMarks(tmp_path, "a").of_dead_processes()) == [(OutageMark("sess_2", None),)]
    marks.reserve()
    marks.close()
    assert list(tmp_path.iterdir()) == []
