"""The fleet simulator: the real worker in virtual time, with the same figures on either queue."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import pytest

from benchmarks import fleet
from benchmarks._fleet.clock import RealTimeProxy, VirtualLoop
from benchmarks._fleet.engine import Engine, EngineModel

pytestmark = pytest.mark.slow

MODEL = EngineModel(kv_tokens=10_000, batch=4, prefill=1000.0, step=0.01, per_request=0.0, per_token=0.0)


def in_virtual_time(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def test_virtual_time_jumps_but_waits_for_threads() -> None:
    class Slow:
        async def work(self) -> float:
            await asyncio.to_thread(time.sleep, 0.05)
            return asyncio.get_running_loop().time()

    async def main() -> tuple[float, float, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(3600)
        outside = RealTimeProxy(Slow(), loop)
        sleeping = asyncio.create_task(asyncio.sleep(10))
        there = await outside.work()
        await sleeping
        assert outside.seconds >= 0.05
        return there, loop.time(), outside.operations

    began = time.monotonic()
    assert in_virtual_time(main()) == (3600.0, 3610.0, 1)
    assert time.monotonic() - began < 30


def test_virtual_time_reports_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    loop = VirtualLoop()
    task = loop.create_task(main())
    with pytest.raises(RuntimeError, match="deadlock"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_engine_model_times() -> None:
    """Computed by hand: 1000 tokens at 1000/s, 100 tokens at 100/s; later turns and siblings reuse cached prefixes."""

    async def main() -> tuple[list[float], int, int]:
        loop = asyncio.get_running_loop()
        engine = Engine(MODEL, loop)
        times = []
        for rollout, own in (("a", 0), ("a", 500), ("b", 0)):
            began = loop.time()
            await engine.generate(rollout, "g", 0, 1000, own, 100)
            times.append(round(loop.time() - began, 3))
        assert engine.kv_usage == 0
        assert engine.in_batch == 0
        return times, engine.count.prompt_tokens, engine.count.computed_tokens

    times, prompt, computed = in_virtual_time(main())
    assert times == [2.0, 1.4, 1.001]  # 400 new tokens in the second turn; one in the sibling's first turn, the minimum
    assert (prompt, computed) == (1000 + 1500 + 1000, 1000 + 400 + 1)


def test_engine_model_shares_and_frees_its_cache() -> None:
    async def main() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        engine = Engine(MODEL, loop)
        # Two requests decode as fast as one, since batching costs nothing here; a third does not fit beside them.
        first = asyncio.create_task(engine.generate("a", "a", 0, 0, 4000, 900))
        second = asyncio.create_task(engine.generate("b", "b", 0, 0, 4000, 900))
        third = asyncio.create_task(engine.generate("c", "c", 0, 0, 4000, 100))
        await asyncio.sleep(1)
        seen = {"waiting": engine.waiting, "in_batch": engine.in_batch, "kv": engine.kv_usage}
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        seen["after"] = (engine.waiting, engine.in_batch)
        await asyncio.gather(second, third)
        seen["left"] = (engine.in_batch, engine.kv_usage, engine.count.output_tokens)
        return seen

    assert in_virtual_time(main()) == {
        "waiting": 1,
        "in_batch": 2,
        "kv": 0.98,
        "after": (0, 2),
        "left": (0, 0.0, 1000),
    }


@pytest.mark.parametrize("name", ["cold", "warm-over-keep"])
def test_the_simulated_queue_gives_the_figures_of_the_real_one(name: str) -> None:
    rows = []
    for store in ("thin", "sqlite"):
        row = fleet.run_one(fleet.Case(name, 8, 4, 3, store, fleet.SETTINGS[name]))
        for measured in ("wall_seconds", "cpu_seconds", "store_seconds", "store_calls", "rss_mb"):
            assert row.pop(measured) >= 0
        row["case"].pop("store")
        rows.append(row)
    assert rows[0] == rows[1]
    assert rows[0]["done"] >= 4 * fleet.GROUP
    assert (rows[0]["pool"]["hits"] > 0) == (name != "cold")


def test_kept_rollouts_are_used() -> None:
    found = {}
    for name in ("warm", "warm-over", "warm-over-keep"):
        row = fleet.run_one(fleet.Case(name, 16, 16, 3, "thin", fleet.SETTINGS[name]))
        found[name] = row["sampled_in_vain"]
        assert row["done"] >= 16 * fleet.GROUP
    assert found["warm"] == 0
    assert 0 < found["warm-over-keep"] < found["warm-over"]


def test_prints_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each case is simulated in its own process."""
    monkeypatch.setattr(sys, "argv", ["fleet.py", "--json", "--sizes", "8", "--settings", "cold,warm"])
    assert fleet.main() == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["case"]["name"] for row in report["rows"]] == ["cold", "warm"]
    assert {row["case"]["store"] for row in report["rows"]} == {"sqlite"}
    cold, warm = report["rows"]
    assert warm["preparing_seconds"]["p50"] < cold["preparing_seconds"]["p50"]
    assert report["models"]["engine"]["kv_tokens"] == 680_000
