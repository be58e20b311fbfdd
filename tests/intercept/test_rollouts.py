"""Rollouts of agents that call a provider's own host."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxes.choice import available
from tests.cli.runner import polar_json

pytestmark = pytest.mark.slow

BODY = '{"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}'
AGENT = f"shell:curl -sS --fail -H 'x-api-key: none' -d '{BODY}' https://api.anthropic.com/v1/messages"


@pytest.mark.skipif(not next(a.ok for a in available() if a.kind == "bubblewrap"), reason="apt-get install bubblewrap")
def test_an_agent_with_a_fixed_endpoint_is_recorded_in_its_rollout(polar_home: Path) -> None:
    options = (
        "--engine",
        "scripted",
        "--sandbox",
        "bubblewrap",
        "--harness",
        AGENT.replace("{", "{{").replace("}", "}}"),
    )
    rollout = polar_json("run", "swe-task", "--intercept", *options)["rollouts"][0]
    assert rollout["status"] == "done"
    (call,) = polar_json("show", rollout["session_id"])["calls"]
    assert (call["dialect"], call["status"], call["edge"]) == ("anthropic_messages", "ok", "root")
    plain = polar_json("run", "swe-task", *options)["rollouts"][0]
    assert (plain["status"], plain["cause"]) == ("failed", "agent")


def test_a_process_sandbox_is_refused(polar_home: Path) -> None:
    options = ("--engine", "scripted", "--sandbox", "process", "--harness", "shell:true")
    rollout = polar_json("run", "swe-task", "--intercept", *options)["rollouts"][0]
    assert rollout["status"] == "failed"
    assert "--sandbox bubblewrap or docker" in rollout["error"]
