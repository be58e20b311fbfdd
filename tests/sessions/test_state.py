"""What is remembered of each session's last request, and for how long."""

from __future__ import annotations

from polar_proxy.dialects import OpenAIChat
from polar_proxy.sessions.state import ParseCache

PARSED = OpenAIChat().parse({"model": "m", "messages": [{"role": "user", "content": "hi"}]})


def test_the_last_request_of_a_session_in_its_dialect() -> None:
    recent = ParseCache()
    recent.put("a", "openai_chat", PARSED, None, 10)
    found = recent.get("a", "openai_chat")
    assert found is not None
    assert found.parsed is PARSED
    assert recent.get("a", "anthropic") is None
    assert recent.get("b", "openai_chat") is None


def test_those_that_asked_least_recently_go_first() -> None:
    recent = ParseCache(capacity=30)
    for session in ("a", "b", "c", "a", "d"):
        recent.put(session, "openai_chat", PARSED, None, 10)
    assert [session for session in "abcd" if recent.get(session, "openai_chat")] == ["a", "c", "d"]
    recent.put("e", "openai_chat", PARSED, None, 31)  # larger than all that may be kept
    assert recent.get("e", "openai_chat") is None
