"""`polar build`, `polar audit` and `polar rescore`."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from polar_proxy.cli.traces import NO_ROWS
from polar_proxy.config import GatewaySettings
from polar_proxy.engines.hosted.openai import OpenAIEngine
from polar_proxy.engines.scripted import ScriptedEngine, decode
from polar_proxy.gateway import Gateway
from polar_proxy.store import open_store
from polar_proxy.traces.builders import build
from polar_proxy.traces.check import check_row
from polar_proxy.types import Json, new_id
from tests.cli.runner import polar, polar_error, polar_json, polar_ok
from tests.export.recorded_runs import rollout
from tests.fakes.strict_api import StrictApi
from tests.fakes.vllm_server import Answer
from tests.traces.test_canonical import DRIFTED, FIRST

pytestmark = pytest.mark.slow


def export(path: Path, *options: str) -> list[Json]:
    done = polar("export", "--format", "tokens-jsonl", "--out", str(path), *options)
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert done.exit_code == (0 if rows else NO_ROWS), done.stderr
    return rows


# Build


def test_build_without_a_match_lists_existing_values(polar_home: Path) -> None:
    async def fill() -> None:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            await rollout(store, reward=1.0)

    asyncio.run(fill())
    assert "Values of harness: mini-swe-agent (1)" in polar("build", "--where", "harness=codex").stderr


@pytest.fixture
def drifted_session(polar_home: Path) -> str:
    """The id of a session of two turns, the second of which drifted."""

    async def fill() -> str:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            session = await store.sessions.create(key_hash=None, label=None, origin="open")
            ids = {"a": new_id("call"), "b": new_id("call"), None: None}
            for call in (FIRST, DRIFTED):
                named = {"call_id": ids[call.call_id], "base_call_id": ids[call.base_call_id]}
                await store.calls.commit(replace(call, **named, session_id=session.session_id))
            return session.session_id

    return asyncio.run(fill())


def test_build_replaces_traces_by_those_of_another_builder(drifted_session: str, tmp_path: Path) -> None:
    split = polar_json("build", drifted_session)
    assert (split["builder"], split["on_drift"], split["skipped"]) == ("merged", "split", {})
    (merged_row,) = split["sessions"]
    assert merged_row["session_id"] == drifted_session
    assert merged_row["calls"] == {"recorded": 2, "trained": 2, "excluded": {}}
    assert (merged_row["traces"], merged_row["grades"], merged_row["drift"]) == (2, {"exact": 2}, {"split": 1})

    (tree,) = polar_json("build", drifted_session, "--builder", "tree")["sessions"]
    assert tree["trained_tokens"] == merged_row["trained_tokens"]
    assert tree["tokens"] < merged_row["tokens"]


def test_build_joins_drifted_turns_if_asked(drifted_session: str, tmp_path: Path) -> None:
    (joined,) = polar_json("build", "--on-drift", "canonical")["sessions"]
    assert (joined["traces"], joined["grades"], joined["drift"]) == (1, {"approximate": 1}, {"canonical": 1})
    assert "1 canonical" in polar_ok("build", drifted_session, "--on-drift", "canonical")
    (row,) = export(tmp_path / "train.jsonl", "--all-grades")
    assert row["certificate"]["on_drift"] == "canonical"
    assert list(check_row(row).problems) == []


def test_build_reports_invalid_options(drifted_session: str) -> None:
    for options, message in (
        ((drifted_session, "--on-drift", "rescore"), "--engine"),
        ((drifted_session, "--on-drift", "ignore"), "canonical"),
        ((drifted_session, "--builder", "tree", "--on-drift", "canonical"), "merged"),
        (("sess_0",), "sess_0"),
        ((drifted_session, "--where", "reward>0"), "either"),
    ):
        assert message in polar_error("build", *options), options


# Audit


async def record_call(home: Path, *, wrong_by: float = 0.0) -> str:
    """Record a session of one answered call and build its trace; one log-probability may be changed."""
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
        if wrong_by:
            choice = call.choices[0]
            values = choice.logprobs + np.float32(wrong_by) * (np.arange(choice.logprobs.size) == 3)
            call = replace(call, call_id=new_id("call"), choices=(replace(choice, logprobs=values),))
            session = await store.sessions.create(key_hash=None, label=None, origin="open")
            call = replace(call, session_id=session.session_id)
            await store.calls.commit(call)
        built = build([call])
        certificates: dict[str, Json] = {trace.trace_id: {} for trace in built.traces}
        await store.traces.put(built.traces, {}, "merged", call.session_id, certificates=certificates)
        return call.session_id


def audit(*options: str, exit_code: int = 0) -> Any:
    return polar_json("audit", "--engine", "scripted", *options, exit_code=exit_code)


def test_audit_accepts_correct_logprobs(polar_home: Path) -> None:
    session_id = asyncio.run(record_call(polar_home))
    found = audit("--session", session_id)
    assert (found["traces"], found["grades"], found["skipped"]) == (1, {"exact": 1}, {})
    assert found["tokens"] == len("hello") + 1
    assert found["max_abs_diff"] < 1e-6
    assert found["mean_abs_diff"] <= found["max_abs_diff"]
    assert found["engine"]["engine"] == "scripted"
    assert found["scored_tokens"] > found["tokens"]


def test_audit_rejects_a_wrong_logprob_and_stores_the_grade(polar_home: Path) -> None:
    session_id = asyncio.run(record_call(polar_home, wrong_by=0.25))
    found = audit("--session", session_id, exit_code=1)
    assert found["grades"] == {"rejected": 1}
    worst = found["worst"][0]
    assert (worst["token"], worst["position"]) == ("l", 3)
    assert worst["before"].endswith("assistant:hel")
    assert worst["diff"] == pytest.approx(0.25, abs=1e-5)
    printed = polar("audit", "--engine", "scripted", "--session", session_id)
    assert printed.exit_code == 1
    assert "assistant:hell" in printed.stdout
    assert "rejected trc_" in printed.stdout
    (row,) = sqlite3.connect(polar_home / "polar.db").execute("select certificate from traces where grade='rejected'")
    assert orjson.loads(row[0])["audit"]["max_abs_diff"] == pytest.approx(worst["diff"])
    tolerated = polar("audit", "--engine", "scripted", "--session", session_id, "--tolerance", "0.5")
    assert (tolerated.exit_code, "grades: 1 exact" in tolerated.stdout) == (0, True)


def test_audit_counts_sessions_without_traces(polar_home: Path) -> None:
    asyncio.run(record_call(polar_home, wrong_by=0.25))  # the original call has no trace
    found = audit(exit_code=1)
    assert (found["traces"], found["skipped"]) == (1, {"not_built": 1})
    printed = polar("audit", "--engine", "scripted", "--limit", "1", "--tolerance", "1")
    assert (printed.exit_code, "polar build" in printed.stdout) == (0, False)


def test_audit_reports_invalid_options(polar_home: Path) -> None:
    session_id = asyncio.run(record_call(polar_home))
    for options, message in (
        (("--session", "sess_0"), "sess_0"),
        (("--where", "colour=1"), "colour"),
        (("--engine-url", "http://x", "--engine", "local"), "--engine-url"),
        (("--session", session_id, "--engine", "local"), "'scripted-model'"),
    ):
        assert message in polar_error("audit", "--engine", "scripted", *options), options


# Rescore


async def record_hosted_calls(home: Path) -> None:
    """Record two turns of an agent that talks to a hosted API, which reports no tokens, through the gateway."""
    home.mkdir(exist_ok=True)
    async with StrictApi() as api, OpenAIEngine(api.url) as engine, open_store(f"sqlite:///{home}/polar.db") as store:
        api.script(Answer("First."), Answer("Second."))
        async with (
            Gateway(engine, store, GatewaySettings(port=0)) as gateway,
            httpx.AsyncClient(base_url=gateway.url, headers={"authorization": "Bearer k"}, timeout=60) as http,
        ):
            messages: list[Json] = [{"role": "user", "content": "hi"}]
            for question in ("and?", ""):
                response = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages})
                answer = response.raise_for_status().json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": answer["content"]},
                    {"role": "user", "content": question},
                ]


def test_rescore_builds_off_policy_traces_from_text(polar_home: Path, tmp_path: Path) -> None:
    asyncio.run(record_hosted_calls(polar_home))
    out = tmp_path / "rows.jsonl"
    assert export(out) == []

    found = polar_json("rescore", "--engine", "scripted")
    assert (found["calls"], found["answers"], found["traces"], found["skipped"]) == (2, 2, 1, {})
    assert found["engine"]["engine"] == "scripted"

    # They are exported only with both --builder rescored and --all-grades.
    assert export(out) == export(out, "--all-grades") == export(out, "--builder", "rescored") == []
    (row,) = export(out, "--builder", "rescored", "--all-grades")
    certificate = row["certificate"]
    assert (row["builder"], row["grade"], certificate["grade_reasons"]) == ("rescored", "approximate", ["rescored"])
    assert certificate["rescored"]["engine"] == "scripted"
    assert [one["engine"] for one in certificate["engines"]] == ["openai"]
    mask = np.array(row["loss_mask"])
    assert decode(np.array(row["response_ids"])[mask == 1].tolist()) == "First.Second."
    assert list(check_row(row).problems) == []

    audited = audit("--builder", "rescored")
    assert (audited["traces"], audited["grades"]) == (1, {"approximate": 1})
    assert audited["max_abs_diff"] == pytest.approx(0, abs=1e-6)
    assert "2 answers of 2 calls" in polar_ok("rescore", "--engine", "scripted")


def test_rescore_reports_invalid_options(polar_home: Path) -> None:
    asyncio.run(record_hosted_calls(polar_home))
    assert "--engine" in polar_error("rescore")
    assert "colour" in polar_error("rescore", "--engine", "scripted", "--where", "colour=1")
