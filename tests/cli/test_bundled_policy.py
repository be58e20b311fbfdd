"""The bundled policy says what it can play, ends its answers, and warns of other agents."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from polar_proxy.engines.bundled import MAX_ANSWER_TOKENS, OtherAgentWarning
from tests.cli.runner import polar_serve_text
from tests.factories import call_record

BASH = b'[{"type": "function", "function": {"name": "bash"}}]'


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"tools": BASH}, False),
        ({"tools": None}, True),
        ({"tools": b'[{"type": "function", "function": {"name": "Read"}}]'}, True),
        ({"tools": b'[{"type": "custom", "custom": {"name": "bash"}}]'}, True),
        ({"tools": BASH, "dialect": "anthropic_messages"}, True),
    ],
    ids=["mini-swe-agent", "no tools", "another tool", "custom tool", "another dialect"],
)
def test_warns_once_of_an_agent_other_than_mini_swe_agent(
    changes: dict[str, object], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    observer = OtherAgentWarning()
    for _ in range(2):
        observer(call_record("sess_1", **{"dialect": "openai_chat", **changes}))
    assert ["can only play `polar run swe-task`" in line for line in caplog.messages] == [True] * warned
    assert ["refused because of max_tokens" in line for line in caplog.messages] == [True] * warned


@pytest.mark.slow
def test_serve_says_what_the_policy_can_play(polar_home: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}]}

    def ask(printed: str) -> None:
        url = next(line.split("=")[1] for line in printed.splitlines() if "OPENAI_BASE_URL" in line)
        for limit in (4000, 1):
            answer = httpx.post(f"{url}/chat/completions", json=body | {"max_tokens": limit}, timeout=120).json()
            assert answer["usage"]["completion_tokens"] <= MAX_ANSWER_TOKENS
        refused = httpx.post(f"{url}/messages", json=body | {"max_tokens": 4000}, timeout=120)
        assert refused.json()["error"]["message"].startswith("max_tokens: 4000 > 256, which is the maximum")

    done = polar_serve_text(ask)
    note = "polar-tiny, the bundled policy, can only play `polar run swe-task`"
    assert done.stdout.splitlines()[1].startswith(note)
    assert done.stderr.count("is not mini-swe-agent's") == 1
