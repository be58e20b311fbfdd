"""`polar show` tells a run as a story; `polar top` shows what happens now. Both fit into 80 columns."""

from __future__ import annotations

import asyncio
import io
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from rich.cells import cell_len

from polar_proxy import api_models as m
from polar_proxy.cli import output
from polar_proxy.cli.views.top import top_view
from polar_proxy.cli.views.training import curve_table, left_out_lines, seconds_left, sparkline
from polar_proxy.sessions.lineage_reasons import reason_of
from polar_proxy.store import open_store
from polar_proxy.types import CallRecord, Message, ToolCall, new_id
from tests.cli.runner import polar_json, polar_ok
from tests.factories import answer, call_record, engine_info

LONG = "\n".join(f"line {number}" for number in range(100))
USER = {"role": "user", "content": "Fix the bug."}


def two_turns(session_id: str) -> list[CallRecord]:
    """Return a call that uses a tool, and one that reads the tool's long result and answers."""
    used = Message("assistant", "I look.", tool_calls=(ToolCall("c1", "bash", '{"command": "ls -l"}'),))
    first = answer([5, 7], logprobs=[-0.01, -3.0])
    root = call_record(
        session_id,
        messages=(orjson.dumps(USER),),
        tools=None,
        choices=(replace(first, message=used),),
        engine=engine_info(engine="scripted", model="scripted-model"),
    )
    later = (orjson.dumps(USER), orjson.dumps(used.to_openai()))
    result = orjson.dumps({"role": "tool", "tool_call_id": "c1", "content": LONG})
    done = replace(answer([8]), message=Message("assistant", "Done."))
    more = {"call_id": new_id("call"), "messages": (*later, result), "choices": (done,), "edge": "continues"}
    return [root, replace(root, **more, parent_call_id=root.call_id, rule="extends", started_at=root.ended_at + 2)]


@pytest.fixture
def session(polar_home: Path) -> str:
    polar_home.mkdir()

    async def save() -> str:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            row = await store.sessions.create(key_hash=None, label="mine", origin="open")
            for call in two_turns(row.session_id):
                await store.calls.commit(call)
            return row.session_id

    return asyncio.run(save())


def test_a_session_is_a_story(session: str) -> None:
    lines = polar_ok("show", session).splitlines()
    text = "\n".join(lines)
    first, second = (next(line for line in lines if line.startswith(start)) for start in ("1 root", "2 continues 1"))
    assert first.endswith("+0.0 s")
    assert "call_" in second
    assert f"  extends: {reason_of('extends')}" in lines
    assert text.count("Fix the bug.") == 1  # the second call repeats it, and adds only the tool's result
    assert text.count("I look.") == 1
    assert "    -> bash ls -l" in lines
    at = lines.index("  tool bash")
    assert lines[at + 1 : at + 3] == ["    line 0", "    line 1"]
    assert "    [87 lines left out]" in lines
    assert "    line 99" in lines
    assert "    Done." in lines
    assert "  prompt 7 (3 cached), sampled 2, 1.86 s, stop" in lines


def test_the_json_of_a_session_has_the_story(session: str) -> None:
    root, second = polar_json("show", session)["calls"]
    assert (second["edge"], second["rule"], second["reason"]) == ("continues", "extends", reason_of("extends"))
    (result,) = second["new_messages"]
    assert (result["role"], result["tool"], result["text"]) == ("tool", "bash", LONG)
    assert root["answer"]["tool_calls"] == [{"name": "bash", "arguments": '{"command": "ls -l"}', "left_out": 0}]
    assert root["answers"] == []


def test_a_long_message_is_cut_in_the_record(polar_home: Path) -> None:
    polar_home.mkdir()

    async def save() -> str:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            row = await store.sessions.create(key_hash=None, label=None, origin="open")
            text = orjson.dumps({"role": "user", "content": "x" * 10_000})
            await store.calls.commit(call_record(row.session_id, messages=(text,), tools=None))
            return row.session_id

    (call,) = polar_json("show", asyncio.run(save()))["calls"]
    assert call["new_messages"][0]["left_out"] == 6000
    assert len(call["new_messages"][0]["text"]) < 4100


def test_tokens_are_coloured_on_a_terminal_and_lines_in_a_pipe(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_ENGINE__KIND", "scripted")
    piped = polar_ok("show", session, "--tokens")
    assert "5:-0.010" in piped
    assert "7:-3.000" in piped
    assert "\x1b" not in piped
    monkeypatch.setattr(output.out, "_force_terminal", True)
    monkeypatch.setattr(output.out, "no_color", False)
    monkeypatch.setattr(output.out, "_color_system", output.Console(color_system="standard")._color_system)
    coloured = polar_ok("show", session, "--tokens")
    assert "\x1b[35m" in coloured  # p = 0.05
    assert "perplexity 4.50" in coloured


def test_a_story_fits_into_80_columns_and_keeps_its_margin(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 80)
    monkeypatch.setattr(output.out, "_force_terminal", True)
    lines = polar_ok("show", session).splitlines()
    assert max(cell_len(line) for line in lines) <= 80
    at = lines.index(next(line for line in lines if line.startswith("    line 0")))
    assert all(line.startswith("    ") for line in lines[at : at + 14])


def test_reasons_are_known_for_every_rule() -> None:
    assert reason_of("codex_compacted") is not None
    assert reason_of(None) is None
    assert reason_of("a rule of the future") is None


def test_top_counts_what_ended_in_the_last_minute(polar_home: Path) -> None:
    polar_home.mkdir()
    now = time.time()

    async def save() -> str:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            row = await store.sessions.create(key_hash=None, label="busy", origin="open")
            for age, status in ((5, "ok"), (10, "upstream_error"), (600, "ok")):
                at = {"started_at": now - age - 1, "first_token_at": None, "ended_at": now - age}
                failed = {"error": "the engine is down", "http_status": 502, "choices": ()} if status != "ok" else {}
                await store.calls.commit(call_record(row.session_id, **at, status=status, **failed))
            return row.session_id

    session_id = asyncio.run(save())
    found = polar_json("top")
    assert found["service"] is None
    rates = found["activity"]["rates"]
    assert (rates["calls"], rates["failed_calls"], rates["prompt_tokens"]) == (2, 1, 14)
    assert [one["session_id"] for one in found["activity"]["sessions"]] == [session_id]
    (failure,) = found["activity"]["failures"]
    assert (failure["what"], failure["error"]) == ("upstream_error", "the engine is down")
    shown = polar_ok("top")
    assert "2 calls (1 failed), 14 prompt tokens" in shown
    assert "upstream_error: the engine is down" in shown


def test_top_of_a_server_shows_engine_and_stages() -> None:
    engine = {"kind": "vllm", "version": "0.32", "model": "m", "healthy": True, "reason": None}
    engine |= {"load": {"running": 12, "waiting": 3, "kv_usage": 0.5, "replicas": 1}, "policy_version": "17"}
    judge = {"kind": "openai", "version": "1", "model": "judge-model", "healthy": False, "reason": "401"}
    stage = {"limit": 4, "inside": 2, "waiting": 7, "entered": 10, "waited_seconds": 25.0, "refusals": {}}
    service = m.ServiceState.model_validate(
        {
            "version": "1",
            "engine": engine,
            "engines": {"judge": judge},
            "policy_version": "17",
            "feed": {"waiting": 2},
            "fleet": {"state": "working", "paused_until": None, "in_flight": 3},
            "worker": "host:1:a",
            "state": "working",
            "in_flight": 3,
            "stages": {"running": stage},
        }
    )
    names = m.ActivityRates.model_fields
    activity = m.Activity(
        rates=m.ActivityRates(**dict.fromkeys(names, 0)), rollouts={"running": 2}, sessions=[], failures=[]
    )
    console = output.SafeConsole(width=80, force_terminal=True, record=True, file=io.StringIO())
    console.print(top_view("http://127.0.0.1:8399", service, activity))
    shown = console.export_text()
    assert max(cell_len(line) for line in shown.splitlines()) <= 80
    assert "12 running, 3 in the queue, KV ██████████░░░░░░░░░░ 50%" in shown
    assert "engine     vllm 0.32  m  healthy  policy 17" in shown
    assert "judge      openai 1  judge-model  401" in shown
    (line,) = [one for one in shown.splitlines() if one.strip().startswith("running")]
    assert line.split()[1:] == ["██████░░░░░░", "2", "4", "7", "2.5", "s"]


def test_training_curves_time_left_and_reasons() -> None:
    assert sparkline([0.0, None, 0.5, 1.0]) == "▁ ▅█"
    assert sparkline([None, None]) == "  "
    assert len(sparkline(list(np.arange(100.0)))) == 40
    skipped = {"masked": {"rollouts": 2, "traces": 2, "tokens": 30}}
    steps = [
        {"step": at, "reward": at / 4, "skipped": skipped, "dropped_stale": 1, "step_seconds": 10.0} for at in (1, 2)
    ]
    assert list(left_out_lines(steps)) == [
        "rollouts not trained: 4 masked (60 tokens)",
        "groups dropped as too stale: 2",
    ]
    assert seconds_left(steps, 5) == 30.0
    assert curve_table(steps).row_count == 2
