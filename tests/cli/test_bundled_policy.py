"""The bundled policy says what it can play, ends its answers, and warns of other agents."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from polar_proxy.engines.bundled import MAX_ANSWER_TOKENS, OtherAgentWarning
from tests.cli.process import POLAR, environment
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
def test_serve_says_what_the_policy_can_play(polar_home: Path, tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}]}
    command = [POLAR, "serve", "--port", "0"]
    with subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            printed = [process.stdout.readline()]
            while not printed[-1].startswith("then:"):
                printed.append(process.stdout.readline())
                assert printed[-1], printed
            url = next(line.split("=")[1].strip() for line in printed if "OPENAI_BASE_URL" in line)
            for limit in (4000, 1):
                answer = httpx.post(f"{url}/chat/completions", json=body | {"max_tokens": limit}, timeout=120).json()
                assert answer["usage"]["completion_tokens"] <= MAX_ANSWER_TOKENS
            refused = httpx.post(f"{url}/messages", json=body | {"max_tokens": 4000}, timeout=120)
            assert refused.json()["error"]["message"].startswith("max_tokens: 4000 > 256, which is the maximum")
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=120)
        finally:
            process.kill()
    assert printed[1].startswith("polar-tiny, the bundled policy, can only play `polar run swe-task`")
    assert log.count("is not mini-swe-agent's") == 1
