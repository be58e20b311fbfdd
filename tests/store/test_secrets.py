"""Secrets are removed before anything is stored; other values stay unchanged."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from polar_proxy.store import Store, schema, secrets
from polar_proxy.store.encoding.cells import CellCodec, bytes_before
from polar_proxy.store.encoding.packed_json import unpack_small_json
from polar_proxy.store.secrets import (
    REMOVED,
    bytes_without_secrets,
    json_without_secrets,
    log_without_secrets,
    without_secrets,
)
from tests.factories import assert_same, call_record, new_rollout, new_session

pytestmark = pytest.mark.slow

# Invented keys in the format of each provider.
_PLANTED = {
    "openai": "sk-proj-" + "Ab1" * 12,
    "anthropic": "sk-ant-api03-" + "Cd2" * 12,
    "polar": "sk-polar-" + "Ef3" * 10,
    "admin": "polar-admin-" + "Gh_" * 10,
    "callbacks": "whsec_" + "Kl0+" * 8,
    "google": "AIza" + "Gh4" * 11 + "xy",
    "github": "ghp_" + "Ij5" * 12,
    "hugging face": "hf_" + "Kl6" * 11,
    "slack": "xoxb-" + "123456-" * 3 + "abc",
    "aws": "AKIA" + "ABCDEFGH12345678",
    "jwt": "eyJhbGciOiJI1.eyJzdWIiOiIx.SflKxwRJSMeKK",
    "field": "no-pattern-knows-me",
    "header": "another-one-by-its-place",
    "url": "pa55word",
    "query": "by-its-name-only",
}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Authorization: Bearer abc.def-123456789", f"Authorization: Bearer {REMOVED}"),
        ("postgresql://me:hunter2@db/x", f"postgresql://{REMOVED}@db/x"),
        ("/v1beta/models/g:generateContent?key=abc&alt=sse", f"/v1beta/models/g:generateContent?key={REMOVED}&alt=sse"),
        ("/s/any-name/v1/messages", f"/s/{REMOVED}/v1/messages"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nrest", f"{REMOVED}\nrest"),
        *((f"got '{_PLANTED[name]}'.", f"got '{REMOVED}'.") for name in list(_PLANTED)[:11]),
    ],
)
def test_removes_secrets_from_text(text: str, clean: str) -> None:
    assert without_secrets(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        *("a basic understanding", "bearer authentication is needed", "risk-taking-is-not-a-key-here", "/v1/messages"),
        *(
            "https://example.org/a?page=2&keyword=x",
            "sk-learn-is-a-library-name",
            "the token was 5",
            "mail me@host.org",
        ),
        *("https://example.org:8080/x@y", "hf_transfer", "eyJhbGci", "git@github.com:me/it.git", "sk-1"),
    ],
)
def test_keeps_text_without_secrets(text: str) -> None:
    assert without_secrets(text) is text


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "sk-",
            "sk-1-pk-",
            "eyJaaaaaaaa-",
            "eyJaaaaaaaa.",
            "polar-admin-",
            "whsec_",
            "AIza",
            "ghp_",
            "glpat-",
            "xoxb-",
        ),
        *(
            "Bearer ",
            "basic\t",
            "Basic a",
            "-----BEGIN A",
            "-----BEGIN PRIVATE KEY-----",
            "-----END A",
            "://a:",
            "?key=",
        ),
    ],
)
def test_removing_secrets_takes_time_linear_in_the_text(piece: str) -> None:
    started = time.thread_time()
    without_secrets(piece * (200_000 // len(piece)))
    assert time.thread_time() - started < 2


def test_text_without_signs_of_secrets_is_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    never = create_autospec(re.Pattern)
    monkeypatch.setattr(secrets, "FORMS", [form._replace(pattern=never) for form in secrets.FORMS])
    assert without_secrets(text := "How is the weather? Fine & dry; a=1, b/s. " * 100) is text
    never.sub.assert_not_called()


def test_long_text_is_scanned_in_pieces_that_cut_no_secret() -> None:
    """Each piece is scanned by one call, which holds up all other threads."""
    secret = _PLANTED["openai"]
    for gap in range(60):
        text = "w " * 32_750 + "w" * gap + f" Authorization: Bearer\t {secret[8:]} " + "w " * 32_768 + secret
        assert secret[8:] not in without_secrets(text)
    assert max(map(len, secrets._pieces("w" * 1_000_000))) <= 1 << 17
    assert "".join(secrets._pieces(text)) == text


def test_removes_secret_fields() -> None:
    schema_of_a_tool = {
        "properties": {"password": {"type": "string"}, "token": {"type": "string"}},
        "required": ["token"],
    }
    given = {
        "authorization": "x",
        "API-Key": "y",
        "headers": {"X-Mine": "z", "n": 1, "token": ["q"]},
        "cookie": ["a", "b"],
        "api_key": "",
    }
    clean = json_without_secrets({**given, "parameters": schema_of_a_tool, "max_tokens": 5, "token": None})
    assert clean == {
        "authorization": REMOVED,
        "API-Key": REMOVED,
        "headers": {"X-Mine": REMOVED, "n": 1, "token": [REMOVED]},
        "cookie": [REMOVED, REMOVED],
        "api_key": "",
        "parameters": schema_of_a_tool,
        "max_tokens": 5,
        "token": None,
    }


def test_json_without_secrets_keeps_its_bytes() -> None:
    for content in (b'[ {"type" : "function"} ]', b"", b"\xff\x00", b'{"a":1.0, "b":"\\ud800"}'):
        assert bytes_without_secrets(content) == content
    assert log_without_secrets(b"\xff sk-" + b"a1" * 20) == b"\xff " + REMOVED.encode()


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(list(_PLANTED.values())),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["token", "headers", "api_key"]), inner)
    ),
)


@given(_json)
def test_removing_twice_changes_nothing(value: Any) -> None:
    once = json_without_secrets(value)
    assert json_without_secrets(once) is once


async def _everything(store: Store, artifacts: Path) -> bytes:
    """Return everything that is stored: every cell of every table, unpacked, and the files."""
    codec, found = CellCodec(), []
    async with store.database.reading() as connection:
        for table in schema.metadata.sorted_tables:
            if table.name not in ("nodes", "completions"):
                found += [repr(tuple(row)).encode() for row in await connection.execute(select(table))]
        for node in await connection.execute(select(schema.nodes).where(schema.nodes.c.kind == "tools")):
            found.append(codec.unpack_bytes(node.data))
        for (cell,) in await connection.exec_driver_sql("SELECT fingerprint FROM calls WHERE fingerprint IS NOT NULL"):
            found.append(unpack_small_json(cell))
        messages = call_record("").messages
        for answer in await connection.execute(select(schema.completions)):
            found.append(codec.unpack_bytes(answer.message, bytes_before(messages)))
    found += [path.read_bytes() for path in artifacts.rglob("*") if path.is_file()]
    return b"\n".join(found)


async def test_no_planted_secret_is_stored(store: Store, tmp_path: Path) -> None:
    keys = " ".join(list(_PLANTED.values())[:9])
    session_id = await new_session(store)
    rollout_id = await new_rollout(store, session_id)
    tools = [
        {"type": "mcp", "server_url": f"https://me:{_PLANTED['url']}@host/sse?api_key={_PLANTED['query']}"},
        {"type": "mcp", "authorization": _PLANTED["field"], "headers": {"X-Own": _PLANTED["header"]}},
        {"type": "function", "function": {"name": "f", "description": keys, "parameters": {}}},
    ]
    params = {
        "mcp_servers": [{"name": "x", "authorization_token": _PLANTED["field"]}],
        "metadata": {"user": keys, "note": "kept"},
        "extra_headers": {"X-Own": _PLANTED["header"]},
    }
    call = call_record(
        session_id,
        tools=json.dumps(tools).encode(),
        params=params,
        sampling={"api_key": _PLANTED["field"], "temperature": 1.0},
        model=f"org/{_PLANTED['openai']}",
        thread=_PLANTED["openai"],
        fingerprint={"thread": _PLANTED["openai"]},
        path=f"/v1beta/models/m:generateContent?key={_PLANTED['query']}",
        error=f"401: invalid key {keys}",
        status="upstream_error",
    )
    await store.calls.commit(call)
    await new_session(store, label=keys)
    await store.rewards.add(rollout_id, 1.0, keys, {"note": keys})
    await store.rollouts.update(rollout_id, error=f"failed with {keys}")
    await store.artifacts.add(rollout_id, "agent.log", f"POST x-api-key: {keys}".encode())
    stored = await _everything(store, tmp_path / "artifacts")
    assert {name for name, secret in _PLANTED.items() if secret.encode() in stored} == set()
    assert b"kept" in stored
    assert await store.maintenance.verify() == []
    found = await store.calls.get(call.call_id)
    assert found is not None
    assert found.params["metadata"] == {"user": " ".join([REMOVED] * 9), "note": "kept"}
    again = call_record(session_id, tools=found.tools, params=found.params, sampling=found.sampling)
    await store.calls.commit(again)
    assert_same(await store.calls.get(again.call_id), again)


async def test_messages_answers_and_patches_stay_unchanged(store: Store) -> None:
    """They are what the model read and wrote, and a changed patch would not apply."""
    session_id = await new_session(store)
    rollout_id = await new_rollout(store, session_id)
    call = call_record(
        session_id, messages=(b'{"role":"user","content":"my key is %s"}' % _PLANTED["openai"].encode(),)
    )
    await store.calls.commit(call)
    assert_same(await store.calls.get(call.call_id), call)
    patch = f"+KEY = '{_PLANTED['openai']}'".encode()
    artifact = await store.artifacts.add(rollout_id, "patch.diff", patch)
    assert artifact.path.read_bytes() == patch
