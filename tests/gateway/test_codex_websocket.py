"""The real Codex with its built-in provider, which sends its requests over a WebSocket if the server takes one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.codex import Codex
from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.openai_responses.websocket import ResponsesWebSocketDialect
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway.handler import RequestHandler
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.harness_adapters import real_runs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

QUIET = ("features.plugins=false", "analytics.enabled=false", "check_for_update_on_startup=false")
"""Settings without which it looks for plugins and updates on the internet."""


async def test_turns_go_over_the_websocket_and_are_sampled_once(
    serve: Serve,
    store: Store,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over_websocket: list[bool] = []
    handle = RequestHandler.handle

    async def noting_handle(self: RequestHandler, dialect: Dialect, *arguments: Any, **options: Any) -> None:
        over_websocket.append(isinstance(dialect, ResponsesWebSocketDialect))
        await handle(self, dialect, *arguments, **options)

    monkeypatch.setattr(RequestHandler, "handle", noting_handle)
    program = Codex().command(real_runs.install(Codex(), tmp_path_factory))
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("hello\n")
    shell = real_runs.call("exec_command", json.dumps({"cmd": "rev a.txt"}))
    engine = ScriptedEngine(real_runs.play(shell, "All done.", "Still done."))
    async with serve(engine) as gateway:
        settings = [f"openai_base_url={json.dumps(gateway.url + '/v1')}", *QUIET]
        options = [
            "--dangerously-bypass-approvals-and-sandbox",
            "--skip-git-repo-check",
            *(word for setting in settings for word in ("--config", setting)),
        ]
        env = {"CODEX_HOME": str(tmp_path), "CODEX_API_KEY": real_runs.KEY}
        for words in (["Reverse the file a.txt."], ["resume", "--last", "And now?"]):
            code, output = await real_runs.run_program([*program, "exec", *options, *words], work, env, 300)
            assert code == 0, output[-3000:]
            assert "econnecting" not in output
    (session,) = await store.sessions.recent()
    calls = await store.calls.of_session(session.session_id)
    assert [(call.edge, call.status) for call in calls] == [("root", "ok"), ("continues", "ok"), ("continues", "ok")]
    assert "olleh" in b"".join(calls[1].messages).decode(), "the model does not see the output of its command"
    assert (engine.finished, engine.aborted) == (len(calls), 0)
    assert len(over_websocket) >= len(calls)
    assert all(over_websocket)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
