"""Client metadata of harnesses, in headers and bodies."""

from __future__ import annotations

from typing import Any

import pytest

from polar_proxy.sessions.identity import ClientMetadata, key_of_request, read_client_metadata, typed_label

CASES: dict[str, tuple[dict[str, str], dict[str, Any], ClientMetadata]] = {
    "nothing": ({"authorization": "Bearer secret", "user-agent": "x"}, {}, ClientMetadata()),
    "retry": ({"x-stainless-retry-count": "2"}, {}, ClientMetadata(retry=2)),
    "not a number": ({"x-stainless-retry-count": "-1"}, {}, ClientMetadata()),
    "claude": ({"x-claude-code-session-id": "s"}, {}, ClientMetadata(thread="s")),
    "claude's agent": (
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
        {},
        ClientMetadata(thread="a", parent_thread="s", subagent="agent"),
    ),
    "claude's metadata": (
        {},
        {"metadata": {"user_id": '{"session_id":"s","device_id":"d"}'}},
        ClientMetadata(thread="s"),
    ),
    "metadata of others": ({}, {"metadata": {"user_id": "{"}}, ClientMetadata()),
    "codex": (
        {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "p", "x-openai-subagent": "collab_spawn"},
        {},
        ClientMetadata(thread="t", parent_thread="p", subagent="collab_spawn"),
    ),
    "codex compaction": (
        {"thread-id": "t"},
        {"client_metadata": {"request_kind": "compaction"}},
        ClientMetadata(thread="t", request="compaction"),
    ),
    "opencode": (
        {"x-session-id": "s", "x-parent-session-id": "p"},
        {},
        ClientMetadata(thread="s", parent_thread="p", subagent="agent"),
    ),
    "openhands": ({}, {"prompt_cache_key": "conversation"}, ClientMetadata(thread="conversation")),
    "vibe": ({"x-affinity": "v"}, {}, ClientMetadata(thread="v")),
    "too long": ({"x-affinity": "v" * 999}, {}, ClientMetadata(thread="v" * 200)),
    "strange types": (
        {},
        {"prompt_cache_key": 7, "session_id": [], "metadata": [], "client_metadata": 1},
        ClientMetadata(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reads_client_metadata(case: str) -> None:
    headers, params, expected = CASES[case]
    assert read_client_metadata(headers, params) == expected


@pytest.mark.parametrize("key", ["my-run", "any-name-you-like", "agent-2", "EMPTY", "Run 12", "codex"])
def test_a_key_of_plain_words_is_a_label(key: str) -> None:
    assert typed_label(key) == key


@pytest.mark.parametrize(
    "key",
    [
        *("", "1234", "hunter2", "token-abc123", "sk-very-secret-0123456789", "sk-polar-xYzXyZxYz"),
        *("AIzaSyAabcdefghijklmn", "QmxhaGJsYWg", "ghp_abcdefghijklmnopqrstuvwx", "a-b-c-d-e-f", "sess_01abc", "a/b"),
    ],
)
def test_a_key_that_may_be_secret_is_no_label(key: str) -> None:
    assert typed_label(key) is None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer one", "x-api-key": "two"}, "one"),
        ({"authorization": "one", "x-api-key": "two"}, "one"),
        ({"authorization": "Bearer ", "x-api-key": "two", "x-goog-api-key": "three"}, "two"),
        ({"authorization": "Bearer", "x-goog-api-key": "three"}, "three"),
        ({"authorization": ""}, "four"),
    ],
)
def test_the_key_is_the_first_that_is_not_empty(headers: dict[str, str], key: str) -> None:
    assert key_of_request(headers, "four") == key
    assert not key_of_request({"authorization": "Bearer"}, None)
