"""Rollouts that a budget ends: their status, cause, score and mask."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.rollouts import stopping
from polar_proxy.store import open_store
from tests.cli.runner import polar_json
from tests.rollouts.test_run import sandbox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_sandbox_register")]

PLAYER = ("--engine", "tests.fakes.player:PlayerEngine")
CURL = 'curl -s -o /dev/null -H "Authorization: Bearer $OPENAI_API_KEY"'


def run(*arguments: str, harness: str = "tests.fakes.tiny_agent:TinyAgent", kind: str = "process") -> dict[str, Any]:
    given = (*PLAYER, "--sandbox", kind, "--harness", harness, *arguments)
    (rollout,) = polar_json("run", "swe-task", *given)["rollouts"]
    return dict(rollout)


kinds = pytest.mark.parametrize("kind", [sandbox("process"), sandbox("docker")])


@kinds
def test_a_spent_budget_ends_the_rollout(polar_home: Path, kind: str) -> None:
    rollout = run("--max-calls", "2", kind=kind)
    assert (rollout["status"], rollout["cause"], rollout["masked"]) == ("done", "budget", True)
    assert (rollout["calls"], rollout["reward"]) == (2, 0.0)
    assert rollout["exit_code"] == 1  # of the agent, whose call was refused


def test_trains_over_budget_on_request(polar_home: Path) -> None:
    rollout = run("--max-sampled-tokens", "1", "--train-over-budget")
    assert (rollout["cause"], rollout["masked"], rollout["calls"]) == ("budget", False, 1)
    assert rollout["trained_tokens"] == rollout["completion_tokens"] > 0


def test_a_budget_that_suffices_changes_nothing(polar_home: Path) -> None:
    rollout = run("--max-calls", "50", "--max-idle-seconds", "60", "--max-repeats", "20")
    assert (rollout["status"], rollout["cause"], rollout["reward"], rollout["masked"]) == ("done", None, 1.0, False)


@kinds
def test_stops_an_agent_that_goes_on_over_budget(polar_home: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 0.5)
    ask = f"{CURL} -d @body $OPENAI_BASE_URL/chat/completions"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).replace('"', '\\"')
    loop = f'printf %s "{body}" > body; while true; do {ask}; sleep 0.1; done'
    agent = f"shell:sh -c {shlex.quote(loop.replace('{', '{{').replace('}', '}}'))}"
    rollout = run("--max-calls", "3", harness=agent, kind=kind)
    assert (rollout["status"], rollout["cause"], rollout["calls"]) == ("done", "budget", 3)


@kinds
def test_stops_an_idle_agent(polar_home: Path, kind: str) -> None:
    rollout = run("--max-idle-seconds", "1", harness="shell:sleep 300", kind=kind)
    assert (rollout["status"], rollout["cause"], rollout["calls"]) == ("done", "budget", 0)
    assert asyncio.run(spent_limit(polar_home, rollout["session_id"])) == "max_idle_seconds"


async def spent_limit(home: Path, session_id: str) -> str | None:
    async with open_store(f"sqlite:///{home}/polar.db", create=False) as store:
        row = await store.sessions.get(session_id)
        return None if row is None else row.spent
