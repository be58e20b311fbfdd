"""The real mini-swe-agent, installed by its adapter, against a scripted endpoint."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.base import HarnessAdapter, Installation, LaunchContext, get_adapter
from tests.harness_adapters.scripted_endpoint import Reply, ScriptedEndpoint, bash_call, serve

ADAPTER = get_adapter("mini-swe-agent")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

pytestmark = pytest.mark.full


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The harness from the cache in `POLAR_CACHE_DIR`, or installed for this test run."""
    cache = os.environ.get("POLAR_CACHE_DIR")
    return ADAPTER.install(Path(cache) if cache else tmp_path_factory.mktemp("cache"))


def launch(
    installed: Installation, server: ScriptedEndpoint, tmp_path: Path, adapter: HarnessAdapter = ADAPTER, **changes: Any
) -> subprocess.CompletedProcess[str]:
    home, workdir = tmp_path / "home", tmp_path / "work"
    home.mkdir(parents=True)
    workdir.mkdir()
    context = LaunchContext(
        base_url=server.base_url,
        api_key="sk-test",
        model="polar-tiny",
        instruction='Say `hello`; it\'s "broken".',
        home=str(home),
        workdir=str(workdir),
    )
    plan = adapter.launch(installed, replace(context, **changes))
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", **plan.env}
    return subprocess.run(
        plan.argv, cwd=workdir, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


def test_run_works_in_the_workspace_and_submits(installed: Installation, tmp_path: Path) -> None:
    commands = ["pwd > where.txt; echo $HOME >> where.txt", SUBMIT]

    def script(body: Mapping[str, Any]) -> Reply:
        number = sum(message["role"] == "assistant" for message in body["messages"])
        return bash_call(commands[number], number)

    with serve(script) as server:
        done = launch(installed, server, tmp_path)
    assert ADAPTER.interpret(done.returncode, done.stdout) == ("ok", "submitted")
    expected = f"{tmp_path / 'work'}\n{tmp_path / 'home'}\n"
    assert (tmp_path / "work" / "where.txt").read_text() == expected
    headers, body = server.requests[-1]
    assert headers["authorization"] == "Bearer sk-test"
    assert set(body) == {"messages", "model", "tools"}
    assert body["model"] == "polar-tiny"
    assert 'Say `hello`; it\'s "broken".' in body["messages"][1]["content"]
    assert body["messages"][2]["reasoning_content"] == "Let me see."


def test_quick_client_sends_the_same_requests(installed: Installation, tmp_path: Path) -> None:
    """The faster client of examples/learn sends the same requests as the real agent."""
    sent: list[Any] = []
    for adapter in (ADAPTER, get_adapter("examples.learn.harness:QuickMini")):
        folder = tmp_path / adapter.__class__.__name__
        with serve(
            lambda body: bash_call("true" if len(body["messages"]) < 5 else SUBMIT, len(body["messages"]))
        ) as server:
            done = launch(installed, server, folder, adapter)
        assert adapter.interpret(done.returncode, done.stdout) == ("ok", "submitted")
        headers, body = server.requests[-1]
        assert headers["authorization"] == "Bearer sk-test"
        sent.append((body["model"], body["tools"], len(server.requests), [plain(one) for one in body["messages"]]))
    assert sent[0][:3] == sent[1][:3]
    for real, quick in zip(sent[0][3], sent[1][3], strict=True):
        assert real == quick


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the fields that no template reads: nulls, call numbers, and a field of litellm."""
    calls = [{key: call[key] for key in ("id", "type", "function")} for call in message.get("tool_calls") or []]
    kept = {key: value for key, value in message.items() if value is not None and key != "provider_specific_fields"}
    return kept | {"tool_calls": calls}


def test_step_limit_ends_a_run(installed: Installation, tmp_path: Path) -> None:
    with serve(lambda body: bash_call("true", len(body["messages"]))) as server:
        done = launch(installed, server, tmp_path, max_steps=3)
    assert ADAPTER.interpret(done.returncode, done.stdout) == ("ok", "ended by LimitsExceeded")
    assert len(server.requests) == 3


def test_failing_endpoint_ends_the_run_soon_as_failed(installed: Installation, tmp_path: Path) -> None:
    error = {"error": {"message": "out of order", "type": "server_error", "code": None, "param": None}}
    with serve(lambda _: (500, error)) as server:
        done = launch(installed, server, tmp_path)
    outcome, detail = ADAPTER.interpret(done.returncode, done.stdout)
    assert outcome == "failed", detail
    assert len(server.requests) == 3, "it gives up after the second retry"
