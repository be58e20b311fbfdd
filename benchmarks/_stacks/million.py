"""A database of a million calls with minimal rows, and the time of its listings and of the web page."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from polar_proxy.config import Settings
from polar_proxy.store import open_store
from polar_proxy.training.config import GrpoConfig
from polar_proxy.view.server import create_pages

CALLS_IN_A_SESSION = 50
_BASE = 1_750_000_000.0
_USER = b'\x01\x08{"role":"user","content":"go on"}'
_ASSISTANT = b'\x01\x08{"role":"assistant","content":"done"}'
"""A user's and an assistant's message as uncompressed cells of the table `nodes`."""
_RUNS, _STEPS = 10, 1000
"""Number of training runs, and of steps of each."""
_METRICS = {f"metric_{number}": number / 7 for number in range(30)}


def fill(path: Path, calls: int) -> None:
    """Write `calls` calls in sessions of 50; every session is a rollout with a trace, in groups of 8. Ten training runs
    of 1,000 steps trained the groups."""
    asyncio.run(_make(path))
    sessions = calls // CALLS_IN_A_SESSION
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous=OFF")
        db.execute("INSERT INTO settings VALUES (?, '{}')", (bytes(16),))
        length = len(_USER) - 2
        db.execute("INSERT INTO nodes VALUES (?, NULL, 'message', ?, ?, ?)", (bytes(16), length, length, _USER))
        db.execute("INSERT INTO tasks (task_id, family, instruction, spec, created_at) VALUES ('t', 'f', 'i', '{}', 0)")
        _insert(
            db,
            "groups",
            (_group(number) for number in range(sessions // 8 + 1)),
        )
        _insert(db, "sessions", (_session(number) for number in range(sessions)))
        _insert(db, "rollouts", (_rollout(number) for number in range(sessions)))
        _insert(db, "traces", (_trace(number) for number in range(sessions)))
        _insert(db, "training_runs", (_training_run(number) for number in range(_RUNS)))
        _insert(db, "training_lines", (_training_line(number, sessions) for number in range(_RUNS * _STEPS)))
        _insert(db, "leases", (_lease(number, sessions) for number in range(_RUNS * _STEPS)))
        _insert(db, "calls", (_call(number) for number in range(sessions * CALLS_IN_A_SESSION)))
        _insert(db, "completions", (_completion(number) for number in range(sessions * CALLS_IN_A_SESSION)))
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def measure(path: Path, calls: int) -> dict[str, float]:
    """Return the milliseconds of queries in an open store, and of whole commands (`polar_...`)."""
    last = calls // CALLS_IN_A_SESSION - 1
    timed = asyncio.run(_queries(path, last))
    for name, command in (
        ("polar_sessions_ms", ["sessions"]),
        ("polar_show_session_ms", ["show", _session_id(last)]),
        ("polar_show_call_ms", ["show", f"call_{calls - 1:012}"]),
        ("polar_version_ms", ["--version"]),
    ):
        db = [] if command == ["--version"] else ["--db", str(path), "--json"]
        started = time.perf_counter()
        subprocess.run([str(Path(sys.executable).with_name("polar")), *command, *db], check=True, capture_output=True)
        timed[name] = round((time.perf_counter() - started) * 1000, 1)
    return timed


def measure_pages(path: Path, calls: int) -> dict[str, float]:
    """Return the server's milliseconds for each page: the best of five, without network and browser."""
    return asyncio.run(_pages(path, calls // CALLS_IN_A_SESSION - 1))


async def _make(path: Path) -> None:
    async with open_store(str(path)):
        pass


async def _queries(path: Path, last: int) -> dict[str, float]:
    timed: dict[str, float] = {}

    async def clock(name: str, work: Any) -> None:
        started = time.perf_counter()
        await work
        timed[name] = round((time.perf_counter() - started) * 1000, 1)

    async with open_store(str(path), create=False) as store:
        await clock("open_ms", store.schema_revision())
        await clock("sessions_ms", store.sessions.recent(20))
        await clock("sessions_middle_ms", store.sessions.recent(20, before=_session_id(last // 2)))
        await clock("call_rows_ms", store.calls.summaries(_session_id(last)))
        await clock("call_places_ms", store.calls.lineages(_session_id(last)))
        await clock("rollouts_ms", store.rollouts.find(limit=50))
        await clock("rollouts_of_group_ms", store.rollouts.find(group_id=f"group_{last // 8:08}"))
        await clock("rollouts_where_ms", store.rollouts.find(where="reward>=1, harness=codex", limit=50))
        await clock("interrupted_ms", store.rollouts.interrupted())
        await clock("stats_ms", store.maintenance.stats())
    return timed


async def _pages(path: Path, last: int) -> dict[str, float]:
    middle = last // 2
    pages = {
        "overview": "/",
        "server": "/view/parts/service",
        "rollouts": "/view/rollouts",
        "rollouts_middle": f"/view/rollouts?before=roll_{middle:012}",
        "rollouts_where": "/view/rollouts?where=reward>=1,harness=codex",
        "rollouts_where_none": "/view/rollouts?where=reward>=2",
        "sessions": "/view/sessions",
        "sessions_middle": f"/view/sessions?before={_session_id(middle)}",
        "groups": "/view/groups",
        "groups_middle": f"/view/groups?before=group_{middle // 8:08}",
        "jobs": "/view/jobs",
        "training": "/view/training",
        "training_run": f"/view/training/run_{_RUNS // 2}",
        "group": f"/view/groups/group_{middle // 8:08}",
        "group_training": f"/view/parts/groups/group_{middle // 8:08}/training",
        "comparison": f"/view/compare?run=roll_{middle:012}&run=roll_{middle + 1:012}",
        "tokens": f"/view/traces/trc_{middle:012}",
        "rollout": f"/view/rollouts/roll_{middle:012}",
        "session": f"/view/sessions/{_session_id(middle)}",
        "call": f"/view/calls/call_{middle * CALLS_IN_A_SESSION:012}",
        "find": f"/view/find?name=call_{middle * CALLS_IN_A_SESSION:012}",
    }
    timed: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        async with open_store(str(path), create=False) as store:
            transport = httpx.ASGITransport(create_pages(store, Settings(home=Path(home))))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                for name, page in pages.items():
                    seconds = []
                    for _ in range(5):
                        started = time.perf_counter()
                        answer = await client.get(page)
                        seconds.append(time.perf_counter() - started)
                        assert answer.status_code in (200, 303), (name, answer.status_code)
                    timed[name] = round(min(seconds) * 1000, 1)
    return timed


def _insert(db: sqlite3.Connection, table: str, rows: Iterator[dict[str, Any]]) -> None:
    first = next(rows)
    places = ", ".join(f":{name}" for name in first)
    statement = f"INSERT INTO {table} ({', '.join(first)}) VALUES ({places})"
    db.execute(statement, first)
    db.executemany(statement, rows)


def _session_id(number: int) -> str:
    return f"sess_{number:012}"


def _group(number: int) -> dict[str, Any]:
    return {
        "group_id": f"group_{number:08}",
        "task_id": "t",
        "rollout_count": 8,
        "group_size": 8,
        "config": "{}",
        "created_at": _BASE + number,
    }


def _session(number: int) -> dict[str, Any]:
    return {
        "session_id": _session_id(number),
        "key_hash": number.to_bytes(32, "big"),
        "origin": "rollout",
        "rollout_id": f"roll_{number:012}",
        "created_at": _BASE + number,
        "calls": CALLS_IN_A_SESSION,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "last_call_at": _BASE + number,
    }


def _rollout(number: int) -> dict[str, Any]:
    return {
        "rollout_id": f"roll_{number:012}",
        "group_id": f"group_{number // 8:08}",
        "task_id": "t",
        "group_index": number % 8,
        "session_id": _session_id(number),
        "status": "done",
        "reward": number % 2,
        "harness": ("codex", "pi", "opencode")[number % 3],
        "sandbox": "process",
        "engine": "vllm",
        "model": "m",
        "config": json.dumps({}),
        "created_at": _BASE + number,
        "ended_at": _BASE + number,
    }


def _trace(number: int) -> dict[str, Any]:
    return {
        "trace_id": f"trc_{number:012}",
        "session_id": _session_id(number),
        "rollout_id": f"roll_{number:012}",
        "builder": "merged",
        "trace_index": 0,
        "prompt_length": 0,
        "length": 0,
        "trained_tokens": 0,
        "grade": "exact",
        "branch_at": 0,
        "call_ids": "[]",
        "created_at": _BASE,
    }


def _training_run(number: int) -> dict[str, Any]:
    config = json.dumps(GrpoConfig().to_json())
    return {"run_id": f"run_{number}", "name": f"run {number}", "config": config, "created_at": _BASE + number}


def _trained_group(number: int, sessions: int) -> str:
    """Return the id of the group that a step trained. `number`: position of the step among the steps of all runs."""
    return f"group_{number * (sessions // 8) // (_RUNS * _STEPS):08}"


def _training_line(number: int, sessions: int) -> dict[str, Any]:
    run, step = divmod(number, _STEPS)
    return {
        "run_id": f"run_{run}",
        "position": step,
        "kind": "step",
        "step": step + 1,
        "at": _BASE + number,
        "data": json.dumps({**_METRICS, "groups": [_trained_group(number, sessions)]}),
    }


def _lease(number: int, sessions: int) -> dict[str, Any]:
    return {
        "lease_id": f"lease_{number:08}",
        "group_id": _trained_group(number, sessions),
        "consumer": f"run {number // _STEPS}",
        "policy_version": str(number % _STEPS),
        "leased_at": _BASE + number,
        "expires_at": _BASE + number + 600,
        "ended_at": _BASE + number + 60,
        "outcome": "acknowledged",
    }


def _call(number: int) -> dict[str, Any]:
    return {
        "call_id": f"call_{number:012}",
        "session_id": _session_id(number // CALLS_IN_A_SESSION),
        "dialect": "openai_chat",
        "path": "/v1/chat/completions",
        "stream": 1,
        "model": "m",
        "logprob_mode": "raw",
        "status": "ok",
        "http_status": 200,
        "edge": "continues",
        "ambiguous": 0,
        "prompt_mode": "render",
        "message_count": 1,
        "messages_node": bytes(16),
        "params_hash": bytes(16),
        "sampling_hash": bytes(16),
        "completion_tokens": 0,
        "started_at": _BASE + number,
        "ended_at": _BASE + number + 1,
    }


def _completion(number: int) -> dict[str, Any]:
    return {
        "call_id": f"call_{number:012}",
        "choice_index": 0,
        "finish_reason": "stop",
        "tokens": 0,
        "message": _ASSISTANT,
        "token_ids": b"\x01\x21",
        "logprobs": b"\x01\x22",
    }
