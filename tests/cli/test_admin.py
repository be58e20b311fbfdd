"""`polar key`, `polar session` and `polar service`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar_proxy.store import open_store
from polar_proxy.types import Json
from tests.cli.runner import polar_error, polar_json

pytestmark = pytest.mark.slow


def test_api_keys_are_created_listed_and_revoked(polar_home: Path) -> None:
    created = polar_json("key", "new", "--role", "trainer", "--label", "gpu box")
    assert created["key"].startswith("polar-trainer-")
    (row,) = polar_json("key", "list")["keys"]
    assert (row["name"], row["role"], row["label"], row["revoked_at"]) == (created["name"], "trainer", "gpu box", None)
    assert created["key"] not in str(polar_json("key", "list"))
    assert polar_json("key", "revoke", created["name"])["revoked_at"] is not None
    assert "admin or trainer" in polar_error("key", "new", "--role", "boss")
    assert "no API key" in polar_error("key", "revoke", "abcdef123456")


def test_keys_are_never_stored(polar_home: Path) -> None:
    api_key = polar_json("key", "new", "--role", "admin")["key"]
    session_key = polar_json("session", "new")["key"]
    for file in polar_home.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert api_key.encode() not in content, file
            assert session_key.encode() not in content, file


def test_session_key_opens_a_session() -> None:
    created = polar_json("session", "new", "--label", "mine", "--max-tokens", "7")
    assert created["key"].startswith("sk-")
    (session,) = polar_json("sessions")["sessions"]
    assert (session["session_id"], session["label"], session["calls"]) == (created["session_id"], "mine", 0)


def test_a_new_session_may_have_a_budget(polar_home: Path) -> None:
    limits = ("--max-calls", "9", "--max-idle-seconds", "60", "--at-budget", "stop")
    created = polar_json("session", "new", *limits)
    policy = asyncio.run(stored_policy(polar_home, created["session_id"]))
    assert policy == {"max_calls": 9, "max_idle_seconds": 60.0, "at_budget": "stop"}


async def stored_policy(home: Path, session_id: str) -> Json | None:
    async with open_store(f"sqlite:///{home}/polar.db", create=False) as store:
        row = await store.sessions.get(session_id)
        return None if row is None else row.policy


def test_all_servers_of_a_database_are_paused_resumed_and_drained() -> None:
    polar_json("submit", "swe-task")
    assert polar_json("service", "status")["fleet"] == {"state": "working", "in_flight": 0, "paused_until": None}
    paused = polar_json("service", "pause", "--all", "--for", "600")["fleet"]
    assert (paused["state"], paused["paused_until"] is not None) == ("paused", True)
    polar_json("submit", "swe-task")
    assert polar_json("service", "status")["fleet"] == paused
    assert polar_json("service", "resume", "--all")["fleet"]["state"] == "working"
    assert polar_json("service", "drain", "--all", "--timeout", "5")["fleet"]["state"] == "paused"
    assert polar_json("service", "resume", "--all")["fleet"]["state"] == "working"
