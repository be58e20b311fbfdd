"""`polar show CALL`: a conversation of any dialect, for a reader and for a script."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from polar_proxy.cli.app import app
from polar_proxy.store import open_store
from polar_proxy.types import CallRecord, Json, new_id
from tests.export.dialect_requests import BODIES, recorded

pytestmark = pytest.mark.usefixtures("polar_home")


async def keep(home: Path, call: CallRecord) -> str:
    home.mkdir(exist_ok=True)
    async with open_store(f"sqlite:///{home}/polar.db") as store:
        row = await store.sessions.create(key_hash=None, label=None, origin="open")
        call = replace(call, call_id=new_id("call"), session_id=row.session_id)
        await store.calls.commit(call)
    return call.call_id


def shown(call_id: str, *options: str) -> str:
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["show", call_id, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def calls(polar_home: Path) -> dict[str, str]:
    """The call ids of one conversation in each dialect."""
    return {name: asyncio.run(keep(polar_home, recorded(name))) for name in BODIES}


def test_every_dialect_reads_alike(calls: dict[str, str]) -> None:
    told = {name: shown(ident).split("tools ", 1)[1] for name, ident in calls.items()}
    assert set(told.values()) == {told["openai_chat"]}
    lines = [line for line in told["openai_chat"].splitlines() if line]
    assert lines[:10] == [
        *("bash", "system", "Be exact.", "user", "What is here?"),
        *("assistant", '-> bash {"command":"ls"}', "tool c1", "a.py", "user"),
    ]
    assert lines[10] == "And?"
    assert lines[11] == "assistant (choice 0, 2 tokens, stop)"


def test_a_script_gets_it_raw_and_in_one_form(calls: dict[str, str]) -> None:
    for name, ident in calls.items():
        call: Json = orjson.loads(shown(ident, "--json"))
        kept = recorded(name)
        assert call["messages"] == [orjson.loads(message) for message in kept.messages]
        assert call["tools"] == BODIES[name]["tools"]
        assert [message["role"] for message in call["conversation"]["messages"]] == [
            *("system", "user", "assistant", "tool", "user")
        ]
        assert call["conversation"]["tools"] == BODIES["openai_chat"]["tools"]


async def _texts(home: Path) -> list[str]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "look [bold]here[/]"}, image]
    chat = recorded("openai_chat", {"model": "m", "messages": [{"role": "user", "content": parts}]})
    ids = recorded("openai_completions", {"model": "m", "prompt": [1, 2, 3]})
    return [await keep(home, call) for call in (chat, ids, replace(chat, dialect="telegraph"))]


def test_what_is_no_plain_text(polar_home: Path) -> None:
    parts, ids, unknown = asyncio.run(_texts(polar_home))
    assert "user\nlook [bold]here[/]\n[image_url]\n" in shown(parts)
    assert "prompt\n[1,2,3]\n" in shown(ids)
    told = shown(unknown)
    assert "no dialect 'telegraph'" in told
    assert '"look [bold]here[/]"' in told
