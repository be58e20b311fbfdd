"""Real agents whose endpoint cannot be set, started by `polar intercept` as a user starts them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness_adapters.base import Installation, get_adapter
from harness_adapters.codex import Codex
from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.store import Store
from polar_proxy.types import EngineRequest, ToolCall
from sandboxes.choice import available
from tests.cli.process import POLAR, environment
from tests.cli.runner import polar_json
from tests.conftest import Serve
from tests.gateway.agents import recorded_calls
from tests.harness_adapters.real_runs import install

pytestmark = pytest.mark.full

OPTIONS = ("--dangerously-bypass-approvals-and-sandbox", "--json", "--model", "gpt-5")
GITHUB_TOKEN = "github_pat_11SECRETOFTHETEST"
REFRESH_TOKEN = "rt_secret_of_the_login"


@pytest.fixture(scope="session")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(Codex(), tmp_path_factory)


@pytest.fixture(scope="session")
def copilot(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(get_adapter("copilot-signed-in"), tmp_path_factory)


def write_login(folder: Path) -> str:
    """Write the file of a made-up login to ChatGPT, and return its access token."""
    account = {"chatgpt_plan_type": "pro", "chatgpt_account_id": "account-1", "chatgpt_user_id": "user-1"}
    claims = {"exp": int(time.time()) + 864_000, "email": "a@example.com", "https://api.openai.com/auth": account}
    encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()) for part in ({"alg": "x"}, claims))
    parts = [part.decode().rstrip("=") for part in encoded]
    token = ".".join([*parts, "c2lnbmF0dXJl"])
    tokens = {"id_token": token, "access_token": token, "refresh_token": REFRESH_TOKEN, "account_id": "account-1"}
    refreshed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    folder.mkdir()
    (folder / "auth.json").write_text(json.dumps({"OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": refreshed}))
    return token


def shell_once() -> Callable[[EngineRequest], ScriptedReply]:
    """Return a script: one command in a shell, then a text."""
    call = ToolCall("call_1", "exec_command", json.dumps({"cmd": "echo made-by-codex > made.txt"}))
    answers = iter([ScriptedReply("", "", (call,)), ScriptedReply("done")])
    return lambda request: next(answers, ScriptedReply("done"))


async def intercept(gateway: str, mitmproxy: Installation, folder: Path, env: dict[str, str], *agent: str) -> str:
    """Start an agent in `folder` by `polar intercept`, with an empty HOME. Return its output."""
    cache = os.environ.get("POLAR_CACHE_DIR") or str(mitmproxy.root.parent.parent)
    process = await asyncio.create_subprocess_exec(
        *(POLAR, "intercept", "--url", gateway, "--key", "my-run", "--others", "refuse", "--", *agent),
        cwd=folder,
        env={**environment(), "HOME": str(folder.parent), "POLAR_HARNESSES": cache, **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(300):
        out = (await process.communicate())[0].decode()
    assert process.returncode == 0, out
    return out


def stored_bytes(store: Store) -> bytes:
    path = store.database.path
    assert path is not None
    return b"".join(file.read_bytes() for file in path.parent.glob(path.name + "*"))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty repository."""
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


async def test_codex_that_is_signed_in_to_chatgpt_works_and_is_recorded(
    serve: Serve, store: Store, codex: Installation, mitmproxy: Installation, work: Path, polar_home: Path
) -> None:
    token = write_login(work.parent / "codex")
    env = {"CODEX_HOME": str(work.parent / "codex")}
    async with serve(ScriptedEngine(shell_once())) as gateway:
        agent = (str(codex.program), "exec", *OPTIONS, "Make made.txt")
        out = await intercept(gateway.url, mitmproxy, work, env, *agent)
    assert '"turn.completed"' in out
    assert "refused: ab.chatgpt.com" in out
    calls = await recorded_calls(store, 2)
    assert [(call.dialect, call.status, call.edge) for call in calls] == [
        ("openai_responses", "ok", "root"),
        ("openai_responses", "ok", "continues"),
    ]
    assert (work / "made.txt").read_text() == "made-by-codex\n"
    stored = stored_bytes(store)
    assert token.encode() not in stored
    assert REFRESH_TOKEN.encode() not in stored


def test_copilot_that_is_signed_in_runs_in_a_sandbox_without_a_proxy(
    copilot: Installation, polar_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter says that it must be intercepted; nothing else asks for it."""
    if not next(one.ok for one in available() if one.kind == "bubblewrap"):
        pytest.skip("apt-get install bubblewrap")
    monkeypatch.setenv("POLAR_HARNESSES", str(copilot.root.parent.parent))
    options = ("--engine", "scripted", "--sandbox", "bubblewrap", "--harness", "copilot-signed-in")
    rollout = polar_json("run", "swe-task", *options)["rollouts"][0]
    assert (rollout["status"], rollout["error"]) == ("done", None)
    calls = polar_json("show", rollout["session_id"])["calls"]
    assert {(call["dialect"], call["status"]) for call in calls} == {("openai_chat", "ok")}


async def test_copilot_that_is_signed_in_to_github_works_and_is_recorded(
    serve: Serve, store: Store, copilot: Installation, mitmproxy: Installation, work: Path, polar_home: Path
) -> None:
    async with serve(ScriptedEngine(lambda request: "hello from Polar")) as gateway:
        env = {"COPILOT_GITHUB_TOKEN": GITHUB_TOKEN}
        agent = (str(copilot.program), "-p", "Say hello", "--allow-all-tools")
        out = await intercept(gateway.url, mitmproxy, work, env, *agent)
    assert "hello from Polar" in out
    (call,) = await recorded_calls(store, 1)
    assert (call.dialect, call.status) == ("openai_chat", "ok")
    assert GITHUB_TOKEN.encode() not in stored_bytes(store)
