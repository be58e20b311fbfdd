"""What harnesses say in headers and bodies; nothing else is read."""

from __future__ import annotations

from typing import Any

import pytest

from polar_proxy.history import Hints, read_hints

CASES: dict[str, tuple[dict[str, str], dict[str, Any], Hints]] = {
    "nothing": ({"authorization": "Bearer secret", "user-agent": "x"}, {}, Hints()),
    "retry": ({"x-stainless-retry-count": "2"}, {}, Hints(retry=2)),
    "no number": ({"x-stainless-retry-count": "-1"}, {}, Hints()),
    "claude": ({"x-claude-code-session-id": "s"}, {}, Hints(thread="s")),
    "claude's agent": (
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
        {},
        Hints(thread="a", parent_thread="s", subagent="agent"),
    ),
    "claude's metadata": ({}, {"metadata": {"user_id": '{"session_id":"s","device_id":"d"}'}}, Hints(thread="s")),
    "metadata of others": ({}, {"metadata": {"user_id": "{"}}, Hints()),
    "codex": (
        {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "p", "x-openai-subagent": "collab_spawn"},
        {},
        Hints(thread="t", parent_thread="p", subagent="collab_spawn"),
    ),
    "codex compaction": (
        {"thread-id": "t"},
        {"client_metadata": {"request_kind": "compaction"}},
        Hints(thread="t", request="compaction"),
    ),
    "opencode": (
        {"x-session-id": "s", "x-parent-session-id": "p"},
        {},
        Hints(thread="s", parent_thread="p", subagent="agent"),
    ),
    "openhands": ({}, {"prompt_cache_key": "conversation"}, Hints(thread="conversation")),
    "vibe": ({"x-affinity": "v"}, {}, Hints(thread="v")),
    "too long": ({"x-affinity": "v" * 999}, {}, Hints(thread="v" * 200)),
    "strange types": ({}, {"prompt_cache_key": 7, "session_id": [], "metadata": [], "client_metadata": 1}, Hints()),
}


@pytest.mark.parametrize("case", CASES)
def test_hints(case: str) -> None:
    headers, params, expected = CASES[case]
    assert read_hints(headers, params) == expected
