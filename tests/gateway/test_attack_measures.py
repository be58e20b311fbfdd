"""Beside an attack, `benchmarks/attacks.py` measures stalls of the gateway's loop, and waits at a bare server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import uvloop

from benchmarks._attacks.gateway_client import Attacker, chat
from benchmarks._stacks.loop_stalls import read_stalls, watch_new_loops
from benchmarks._stacks.shared_gateway import BareServer, honest_session

pytestmark = pytest.mark.slow


def test_stalls_of_a_loop_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stalls.jsonl"
    monkeypatch.setattr(uvloop, "new_event_loop", uvloop.new_event_loop)
    watch_new_loops(str(file))
    began = time.monotonic()

    async def stall() -> None:
        await asyncio.sleep(0.05)
        time.sleep(0.2)  # blocks the loop
        await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(stall())
    longest = max(read_stalls(file, began), key=lambda stall: stall.own)
    assert longest.seconds > 0.15
    assert longest.cpu < longest.own
    assert read_stalls(file, time.monotonic()) == []


async def test_a_bare_server_answers_the_honest_session_and_drops_the_rest(tmp_path: Path) -> None:
    server = BareServer(tmp_path)
    await asyncio.to_thread(server.start)
    try:
        with honest_session(server.port) as honest:
            attacker = Attacker(server.port, key="sk-attacker", victims_session="")
            assert await attacker.send(attacker.request(chat("x" * 1_000_000))) == 400
            async with asyncio.timeout(30):
                while len(honest.requests) < 5:
                    await asyncio.sleep(0.05)
        assert [fault for _, _, fault in honest.requests if fault] == []
    finally:
        await asyncio.to_thread(server.stop)
