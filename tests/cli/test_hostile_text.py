"""A hostile text in every field of the store reaches no terminal as it is, whichever command prints it."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from sqlalchemy import Text

from polar_proxy.cli import output
from polar_proxy.store import open_store, schema
from polar_proxy.types import Message, ToolCall
from tests.cli.runner import CommandResult, polar
from tests.export.recorded_runs import rollout
from tests.factories import call_record

pytestmark = pytest.mark.slow

WORD = "HOSTILE"
HOSTILE = (
    f"{WORD}\x1b]0;title\x07\x1b[2J\x1b]52;c;AAAA\x1b\\\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\"
    "\x9b31m\x9d0;title\x9c\x08\r\u202eabc\u2066\u200b\u061c\U000e0041\x7f [link=https://evil.example]x[/link] [/] {}"
    "\nFORGED solved 1 of 1\n"
)
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
OWN_STYLES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[[12]?[AK]|\r")
IDS = {"rollout_id", "session_id", "call_id", "trace_id", "group_id", "job_id", "run_id", "lease_id", "artifact_id"}
IDS |= {"parent_call_id", "base_call_id", "parent_trace_id", "reward_id", "callback_id", "sha256", "key_hash"}
STATES = {"status", "delivery", "kind", "builder", "edge", "logprob_mode", "dialect", "origin", "role", "grade"}
STATES |= {"prompt_mode", "stage", "outcome", "incomplete"}
"""Columns with values of Polar's own, by which it decides what to do."""


async def record(home: Path) -> dict[str, str]:
    """Record a rollout whose texts are all hostile, and return its ids."""
    home.mkdir(exist_ok=True)
    async with open_store(f"sqlite:///{home}/polar.db") as store:
        rollout_id, calls = await rollout(store, reward=1.0)
        session_id = calls[0].session_id
        text = {"role": "user", "content": HOSTILE}
        said = Message("assistant", HOSTILE, HOSTILE, tool_calls=(ToolCall(HOSTILE, HOSTILE, HOSTILE),))
        tools = [{"type": "function", "function": {"name": HOSTILE}}]
        fields = {"messages": (orjson.dumps(text),), "tools": orjson.dumps(tools), "params": {"x": HOSTILE}}
        call = call_record(session_id, **fields)
        call = replace(call, choices=(replace(call.choices[0], message=said),))
        await store.calls.commit(call)
        await store.artifacts.add(rollout_id, HOSTILE, b"log")
        await store.rewards.add(rollout_id, 1.0, HOSTILE, {"signs": [HOSTILE], HOSTILE: HOSTILE})
        (row,) = await store.rollouts.find(rollout_ids=[rollout_id])
    assert row.job_id is not None
    return {"rollout": rollout_id, "session": session_id, "call": call.call_id, "job": row.job_id}


def poison(database: Path) -> None:
    """Write the hostile text into every text column that is not an id or a state."""
    with sqlite3.connect(database) as connection:
        connection.execute("INSERT INTO training_runs (run_id, name, config, created_at) VALUES ('run', '', '{}', 0)")
        for table in schema.metadata.sorted_tables:
            for column in table.columns:
                if isinstance(column.type, Text) and column.name not in IDS | STATES:
                    unique = " || rowid" if column.unique or (column.primary_key and column.name != "task_id") else ""
                    connection.execute(f"UPDATE {table.name} SET {column.name} = ?{unique}", (HOSTILE,))


@pytest.fixture
def ids(polar_home: Path) -> dict[str, str]:
    made = asyncio.run(record(polar_home))
    poison(polar_home / "polar.db")
    return made


def run_all(ids: dict[str, str]) -> dict[str, CommandResult]:
    """Run every command that prints what is stored, and some that fail with an error about it."""
    lines = [
        *("sessions", "status", "train list", "db stats", "db verify", "build", "key list", "service status"),
        *("db vacuum", "db prune --older-than 0d --dry-run", "harness list", "export --format nonsense"),
        *("export --format tokens-jsonl --out -", "export --format chat-jsonl --out -"),
        *(
            f"show {ids['rollout']} --tokens",
            f"show {ids['rollout']}",
            f"show {ids['session']}",
            f"show {ids['call']}",
            f"show {ids['call']} --tokens",
        ),
        *(f"status {ids['job']}", f"results {ids['job']}", f"cancel {ids['job']}", f"watch {ids['job']}"),
        *(f"events {ids['job']}", f"show call_{WORD}\x1b[2J", f"status job_{WORD}\x1b[2J"),
        f"export --where harness={WORD}\x1b[2J --out -",
        *("doctor --engine-url http://127.0.0.1:9", f"train status {WORD}\x1b[2J", f"run {WORD}\x1b[2J"),
    ]
    return {line: polar(*line.split(" ")) for line in lines}


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
def test_no_command_prints_a_control_character(
    ids: dict[str, str], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for console in (output.out, output.err):
        monkeypatch.setattr(console, "_force_terminal", terminal)
    shown = 0
    for line, done in run_all(ids).items():
        for text in (done.stdout, done.stderr):
            own = OWN_STYLES.sub("", text) if terminal else text
            assert not COMMANDS.findall(own), (line, text)
            assert "\x1b]" not in text, line
            if not line.startswith("show call_") and not line.startswith("show roll_"):  # texts keep their own lines
                assert not [one for one in own.splitlines() if one.startswith("FORGED")], (line, text)
            shown += WORD in own
        assert "Traceback" not in done.stderr, line
        if done.exit_code == 0 and line.split()[0] in ("sessions", "show", "status", "results"):
            as_json = polar(*line.split(" "), "--json")
            assert not COMMANDS.findall(as_json.stdout), line
            orjson.loads(as_json.stdout)
    if not terminal:  # on a terminal, the view is renewed without end
        assert not COMMANDS.findall(polar("top").stdout)
    assert shown >= 12
