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

from harness_adapters.base import Installation
from harness_adapters.codex import Codex
from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.store import Store
from polar_proxy.types import EngineRequest, ToolCall
from tests.cli.process import POLAR, environment
from tests.conftest import Serve
from tests.gateway.agents import recorded_calls
from tests.harness_adapters.real_runs import install

pytestmark = pytest.mark.full

OPTIONS = ("--dangerously-bypass-approvals-and-sandbox", "--json", "--model", "gpt-5")
REFRESH_TOKEN = "rt_secret_of_the_login"


@pytest.fixture(scope="session")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(Codex(), tmp_path_factory)


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


async def test_codex_that_is_signed_in_to_chatgpt_works_and_is_recorded(
    serve: Serve, store: Store, codex: Installation, mitmproxy: Installation, tmp_path: Path, polar_home: Path
) -> None:
    token = write_login(tmp_path / "codex")
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    cache = os.environ.get("POLAR_CACHE_DIR") or str(mitmproxy.root.parent.parent)
    async with serve(ScriptedEngine(shell_once())) as gateway:
        env = {**environment(), "CODEX_HOME": str(tmp_path / "codex"), "HOME": str(tmp_path), "POLAR_HARNESSES": cache}
        options = ("--url", gateway.url, "--key", "codex-run", "--others", "refuse")
        agent = (str(codex.program), "exec", *OPTIONS, "Make made.txt")
        process = await asyncio.create_subprocess_exec(
            *(POLAR, "intercept", *options, "--", *agent),
            cwd=work,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(300):
            out, error = (part.decode() for part in await process.communicate())
    assert process.returncode == 0, out + error
    assert '"turn.completed"' in out
    assert "refused: ab.chatgpt.com" in error
    calls = await recorded_calls(store, 2)
    assert [(call.dialect, call.status, call.edge) for call in calls] == [
        ("openai_responses", "ok", "root"),
        ("openai_responses", "ok", "continues"),
    ]
    assert (work / "made.txt").read_text() == "made-by-codex\n"
    path = store.database.path
    assert path is not None
    stored = b"".join(file.read_bytes() for file in path.parent.glob(path.name + "*"))
    assert token.encode() not in stored
    assert REFRESH_TOKEN.encode() not in stored
