"""From a hosted API to off-policy rows: served, recorded as text, rescored, exported, audited."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from polar_proxy.cli.app import app
from polar_proxy.config import GatewaySettings
from polar_proxy.engines.openai import OpenAIEngine
from polar_proxy.engines.scripted import decode
from polar_proxy.gateway import Gateway
from polar_proxy.store import open_store
from polar_proxy.traces.check import check_row
from polar_proxy.types import Json
from tests.fakes.hosted_api import HostedApi
from tests.fakes.vllm_server import Answer

pytestmark = pytest.mark.usefixtures("polar_home")


async def serve(home: Path) -> None:
    """Two turns of an agent that talks to a hosted API through the gateway."""
    home.mkdir(exist_ok=True)
    async with HostedApi() as api, OpenAIEngine(api.url) as engine, open_store(f"sqlite:///{home}/polar.db") as store:
        api.script(Answer("First."), Answer("Second."))
        async with (
            Gateway(engine, store, GatewaySettings(port=0)) as gateway,
            httpx.AsyncClient(base_url=gateway.url, headers={"authorization": "Bearer k"}, timeout=60) as http,
        ):
            messages: list[Json] = [{"role": "user", "content": "hi"}]
            for question in ("and?", ""):
                answer = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages})
                said = answer.raise_for_status().json()["choices"][0]["message"]
                messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": question}]


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.stdout


def exported(path: Path, *options: str) -> list[Json]:
    run("export", "--format", "tokens-jsonl", "--out", str(path), *options)
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_all_the_way(polar_home: Path, tmp_path: Path) -> None:
    asyncio.run(serve(polar_home))
    out = tmp_path / "rows.jsonl"
    assert exported(out) == []

    found = orjson.loads(run("rescore", "--engine", "scripted", "--json"))
    assert (found["calls"], found["answers"], found["traces"], found["skipped"]) == (2, 2, 1, {})
    assert found["engine"]["engine"] == "scripted"

    # Only who asks for these traces, and for traces that are not fit for training, gets them.
    assert exported(out) == exported(out, "--all-grades") == exported(out, "--builder", "rescored") == []
    (row,) = exported(out, "--builder", "rescored", "--all-grades")
    assert (row["builder"], row["grade"], row["certificate"]["reasons"]) == ("rescored", "approximate", ["rescored"])
    assert row["certificate"]["rescored"]["engine"] == "scripted"
    assert [one["engine"] for one in row["certificate"]["engines"]] == ["openai"]
    mask = np.array(row["loss_mask"])
    assert decode(np.array(row["response_ids"])[mask == 1].tolist()) == "First.Second."
    assert list(check_row(row)) == []

    audited = orjson.loads(run("audit", "--engine", "scripted", "--builder", "rescored", "--json"))
    assert (audited["traces"], audited["grades"]) == (1, {"approximate": 1})
    assert audited["max_abs_diff"] == pytest.approx(0, abs=1e-6)
    assert "2 answers of 2 calls" in run("rescore", "--engine", "scripted")


def test_it_wants_to_know_whose_tokens(polar_home: Path) -> None:
    asyncio.run(serve(polar_home))
    done = CliRunner().invoke(app, ["rescore"])
    assert "--engine" in str(done.exception)
    done = CliRunner().invoke(app, ["rescore", "--engine", "scripted", "--where", "colour=1"])
    assert "colour" in str(done.exception)
