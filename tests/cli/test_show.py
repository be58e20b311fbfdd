"""`polar show CALL` for people and for programs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from polar_proxy.store import open_store
from polar_proxy.types import CallRecord, new_id
from tests.cli.runner import polar_json, polar_ok
from tests.export.dialect_requests import BODIES, recorded

pytestmark = pytest.mark.slow


async def save(home: Path, call: CallRecord) -> str:
    """Store the call in a new session; return its id."""
    home.mkdir(exist_ok=True)
    async with open_store(f"sqlite:///{home}/polar.db") as store:
        session = await store.sessions.create(key_hash=None, label=None, origin="open")
        call = replace(call, call_id=new_id("call"), session_id=session.session_id)
        await store.calls.commit(call)
    return call.call_id


@pytest.fixture
def calls(polar_home: Path) -> dict[str, str]:
    """The ids of one call in each dialect, all with the same conversation."""
    return {name: asyncio.run(save(polar_home, recorded(name))) for name in BODIES}


def test_every_dialect_is_shown_alike(calls: dict[str, str]) -> None:
    shown = {name: polar_ok("show", call_id).split("tools ", 1)[1] for name, call_id in calls.items()}
    assert set(shown.values()) == {shown["openai_chat"]}
    lines = [line for line in shown["openai_chat"].splitlines() if line]
    assert lines[:10] == [
        *("bash", "system", "Be exact.", "user", "What is here?"),
        *("assistant", '-> bash {"command":"ls"}', "tool c1", "a.py", "user"),
    ]
    assert lines[10] == "And?"
    assert lines[11] == "assistant (choice 0, 2 tokens, stop)"


def test_json_has_the_messages_as_sent_and_in_openai_form(calls: dict[str, str]) -> None:
    for name, call_id in calls.items():
        call = polar_json("show", call_id)
        assert call["messages"] == [orjson.loads(message) for message in recorded(name).messages]
        assert call["tools"] == BODIES[name]["tools"]
        assert [message["role"] for message in call["conversation"]["messages"]] == [
            *("system", "user", "assistant", "tool", "user")
        ]
        assert call["conversation"]["tools"] == BODIES["openai_chat"]["tools"]


def test_images_prompts_and_unknown_dialects_are_shown(polar_home: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "look [bold]here[/]"}, image]
    chat = recorded("openai_chat", {"model": "m", "messages": [{"role": "user", "content": parts}]})
    prompt = recorded("openai_completions", {"model": "m", "prompt": [1, 2, 3]})
    unknown = replace(chat, dialect="telegraph")
    chat_id, prompt_id, unknown_id = (asyncio.run(save(polar_home, call)) for call in (chat, prompt, unknown))
    assert "user\nlook [bold]here[/]\n[image_url]\n" in polar_ok("show", chat_id)
    assert "prompt\n[1,2,3]\n" in polar_ok("show", prompt_id)
    shown = polar_ok("show", unknown_id)
    assert "no dialect 'telegraph'" in shown
    assert '"look [bold]here[/]"' in shown
