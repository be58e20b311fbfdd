"""`polar audit` as a person and a script see it."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from polar_proxy.cli.app import app
from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.store import open_store
from polar_proxy.traces import merged
from polar_proxy.types import Json, new_id

pytestmark = pytest.mark.usefixtures("polar_home")


async def record(home: Path, *, wrong: float = 0.0) -> str:
    """A session of one answered call with its trace built; `wrong` is added to one recorded log-probability."""
    home.mkdir(exist_ok=True)
    async with open_store(f"sqlite:///{home}/polar.db") as store, ScriptedEngine() as engine:
        async with (
            Gateway(engine, store, GatewaySettings(port=0)) as gateway,
            httpx.AsyncClient(base_url=gateway.url, headers={"authorization": "Bearer k"}, timeout=60) as http,
        ):
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 1}
            (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        (row,) = await store.sessions.recent()
        (call,) = await store.calls.of_session(row.session_id)
        if wrong:
            own = call.choices[0]
            values = own.logprobs + np.float32(wrong) * (np.arange(own.logprobs.size) == 3)
            call = replace(call, call_id=new_id("call"), choices=(replace(own, logprobs=values),))
            session = await store.sessions.create(key_hash=None, label=None, origin="open")
            call = replace(call, session_id=session.session_id)
            await store.calls.commit(call)
        built = merged([call])
        certificates: dict[str, Json] = {trace.trace_id: {} for trace in built.traces}
        await store.traces.put(built.traces, {}, "merged", call.session_id, certificates=certificates)
        return call.session_id


def audit(*options: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["audit", "--engine", "scripted", *options])
    return done.exit_code, done.stdout


def test_right(polar_home: Path) -> None:
    session_id = asyncio.run(record(polar_home))
    code, out = audit("--session", session_id, "--json")
    found = orjson.loads(out)
    assert (code, found["traces"], found["grades"], found["skipped"]) == (0, 1, {"exact": 1}, {})
    assert found["tokens"] == len("hello") + 1
    assert found["max_abs_diff"] < 1e-6
    assert found["mean_abs_diff"] <= found["max_abs_diff"]
    assert found["engine"]["engine"] == "scripted"
    assert found["scored_tokens"] > found["tokens"]


def test_wrong(polar_home: Path) -> None:
    session_id = asyncio.run(record(polar_home, wrong=0.25))
    code, out = audit("--session", session_id, "--json")
    found = orjson.loads(out)
    assert (code, found["grades"]) == (1, {"rejected": 1})
    worst = found["worst"][0]
    assert (worst["token"], worst["position"]) == ("l", 3)
    assert worst["before"].endswith("assistant:hel")
    assert worst["diff"] == pytest.approx(0.25, abs=1e-5)
    code, out = audit("--session", session_id)
    assert code == 1
    assert "assistant:hell" in out
    assert "rejected trc_" in out
    (kept,) = sqlite3.connect(polar_home / "polar.db").execute("select certificate from traces where grade='rejected'")
    assert orjson.loads(kept[0])["audit"]["max_abs_diff"] == pytest.approx(worst["diff"])
    code, out = audit("--session", session_id, "--tolerance", "0.5")
    assert (code, "grades: 1 exact" in out) == (0, True)


def test_all_that_has_no_traces_is_told(polar_home: Path) -> None:
    asyncio.run(record(polar_home, wrong=0.25))
    code, out = audit("--json")  # the session that was damaged, and the one that it was made of
    found = orjson.loads(out)
    assert (code, found["traces"], found["skipped"]) == (1, 1, {"not_built": 1})
    code, out = audit("--limit", "1", "--tolerance", "1")
    assert (code, "polar build" in out) == (0, False)


def test_what_cannot_be(polar_home: Path) -> None:
    session_id = asyncio.run(record(polar_home))
    for options, word in (
        (("--session", "sess_0"), "sess_0"),
        (("--where", "colour=1"), "colour"),
        (("--engine-url", "http://x", "--engine", "local"), "--engine-url"),
        (("--session", session_id, "--engine", "local"), "'scripted-model'"),
    ):
        done = CliRunner().invoke(app, ["audit", "--engine", "scripted", *options])
        assert done.exit_code != 0
        assert word in str(done.exception)
