"""`polar show CALL` for people and for programs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer

from polar_proxy.cli import output
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.store import open_store
from polar_proxy.types import CallRecord, new_id
from tests.cli.runner import polar, polar_error, polar_json, polar_ok
from tests.export.dialect_requests import BODIES, recorded
from tests.factories import engine_info

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


def test_a_session_shows_the_errors_of_its_failed_calls(polar_home: Path) -> None:
    failed = replace(recorded("openai_chat"), choices=(), status="upstream_error", error="max_tokens: [257] > 256")
    asyncio.run(save(polar_home, failed))
    assert "upstream_error" in polar_ok("show", "last")
    assert "max_tokens: [257] > 256" in polar_ok("show", "last")


async def new_session(home: Path, label: str | None = None) -> str:
    home.mkdir(exist_ok=True)
    async with open_store(f"sqlite:///{home}/polar.db") as store:
        return (await store.sessions.create(key_hash=None, label=label, origin="key")).session_id


def test_ids_are_not_cut_in_a_pipe_or_on_a_narrow_terminal(polar_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id = asyncio.run(new_session(polar_home, "a label of some length"))
    monkeypatch.setattr(output.out, "width", 40)
    lines = polar_ok("sessions").splitlines()
    assert len(lines) == 2
    assert session_id in lines[1]
    assert "a label of some length" in lines[1]
    monkeypatch.setattr(output.out, "_force_terminal", True)
    assert session_id in polar_ok("sessions")


def test_the_list_of_sessions_names_the_limit_that_was_reached(polar_home: Path) -> None:
    async def spend(session_id: str) -> None:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            await store.sessions.mark_spent(session_id, "max_calls")

    asyncio.run(spend(asyncio.run(new_session(polar_home, "spent"))))
    header, line = polar_ok("sessions").splitlines()
    assert "spent" in header.split()
    assert "max_calls" in line.split()


def test_a_list_without_sessions_says_how_to_record_one(polar_home: Path) -> None:
    polar_ok("db", "upgrade")
    assert "`polar serve`, then `polar connect`, records" in polar("sessions").stderr
    assert polar_json("sessions") == {"sessions": []}


def test_records_are_named_by_prefix_label_and_last(calls: dict[str, str], polar_home: Path) -> None:
    for name in (calls["openai_chat"], calls["openai_chat"][:-1]):
        assert polar_json("show", name)["call_id"] == calls["openai_chat"]
    session_id = asyncio.run(new_session(polar_home, "mine"))
    assert polar_json("show", "mine")["session_id"] == polar_json("show", "mi")["session_id"] == session_id
    assert polar_json("show", "last")["session_id"] == session_id
    assert "mine" in polar_ok("show", session_id).splitlines()[0]
    assert "several names" in polar_error("show", "call_")
    assert "begins with 'nobody'" in polar_error("show", "nobody")


def test_tokens_have_texts_of_the_models_own_tokenizer(polar_home: Path) -> None:
    call = recorded("openai_chat")
    ids = np.array([9707, 198], dtype=np.int32)
    call = replace(call, choices=(replace(call.choices[0], token_ids=ids, logprobs=np.array([-0.5, -1], np.float32)),))
    tiny = engine_info(engine="local", model="polar-tiny")
    tiny_ids = np.array(Tokenizer.from_file(str(POLAR_TINY / "tokenizer.json")).encode("say\nit").ids, np.int32)
    zeros = np.zeros(len(tiny_ids), np.float32)
    tiny_call = replace(call, engine=tiny, choices=(replace(call.choices[0], token_ids=tiny_ids, logprobs=zeros),))
    call_id = asyncio.run(save(polar_home, tiny_call))
    (choice,) = polar_json("show", call_id, "--tokens")["choices"]
    assert "".join(choice["token_texts"]) == "say\nit"
    assert f"{tiny_ids[0]}:0.000 {orjson.dumps(choice['token_texts'][0]).decode()}\n" in polar_ok(
        "show", call_id, "--tokens"
    )
    assert polar_json("show", call_id)["choices"][0]["token_texts"] is None

    unknown = replace(call, engine=engine_info(engine="vllm", model="somewhere/else"))
    shown = polar_ok("show", asyncio.run(save(polar_home, unknown)), "--tokens")
    assert "9707:-0.500 198:-1.000" in shown
    assert "tokenizer of somewhere/else (vllm) is not known here" in shown
    assert "POLAR_ENGINE__MODEL_FOLDER" in shown


def test_tokens_have_texts_of_an_engine_that_answers(polar_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_ENGINE__KIND", "scripted")
    call = recorded("openai_chat")
    ids = np.array([107, 108], dtype=np.int32)
    scripted = engine_info(engine="scripted", model="scripted-model")
    choice = replace(call.choices[0], token_ids=ids, logprobs=np.zeros(2, np.float32))
    call_id = asyncio.run(save(polar_home, replace(call, engine=scripted, choices=(choice,))))
    assert polar_json("show", call_id, "--tokens")["choices"][0]["token_texts"] == ["h", "i"]
