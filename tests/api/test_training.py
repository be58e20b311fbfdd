"""Training runs over HTTP: lines are stored, curves are read."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polar_proxy.store import Store
from tests.api.conftest import ServeApi

pytestmark = pytest.mark.slow


def line(kind: str, step: int, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "at": 5.0 + step, **values}


async def test_lines_become_curves(serve_api: ServeApi, store: Store) -> None:
    lines = [line("start", 0), line("eval", 0, reward=0.5), line("step", 1, reward=0.25, entropy=None)]
    async with serve_api() as running:
        put = {"name": "first", "config": {"loss": "dapo"}, "lines": lines[:1]}
        made = await running.trainer.put("/training/run_1", json=put)
        assert (made.status_code, made.json()["lines"], made.json()["step"]) == (200, 1, 0)
        for _ in range(2):
            assert (await running.post("/training/run_1/lines", {"first": 1, "lines": lines[1:]}))["lines"] == 3
        (listed,) = (await running.get("/training"))["runs"]
        assert (listed["run_id"], listed["name"], listed["step"], listed["updated_at"]) == ("run_1", "first", 1, 6.0)
        detail = await running.get("/training/run_1")
        assert detail["config"] == {"loss": "dapo"}
        assert detail["series"]["eval"]["reward"] == [0.5]
        assert detail["series"]["step"]["reward"] == [0.25]
        assert detail["series"]["step"]["loss"] == detail["series"]["step"]["entropy"] == [None]
        assert await store.training.lines("run_1") == lines


async def test_rejects_unknown_runs_gaps_and_invalid_lines(serve_api: ServeApi, store: Store) -> None:
    async with serve_api() as running:
        assert (await running.get("/training"))["runs"] == []
        assert (await running.get("/training/run_1", status=404))["error"]["code"] == "not_found"
        await running.post("/training/run_1/lines", {"first": 0, "lines": []}, status=404)
        await running.trainer.put("/training/run_1", json={"name": "first", "config": {}})
        gap = {"first": 2, "lines": [line("step", 3)]}
        refused = (await running.post("/training/run_1/lines", gap, status=409))["error"]
        assert (refused["code"], refused["detail"]) == ("conflict", {"lines": 0})
        for wrong in (
            {"kind": "stop", "step": 1, "at": 1.0},
            {"kind": "step", "at": 1.0},
            {"kind": "step", "step": -1},
        ):
            body = {"first": 0, "lines": [wrong]}
            assert (await running.post("/training/run_1/lines", body, status=422))["error"]["code"] == "invalid"
        assert not math.isnan((await running.get("/training/run_1"))["created_at"])
        assert await store.training.lines("run_1") == []
