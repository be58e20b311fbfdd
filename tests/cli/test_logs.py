"""The log of `polar serve`: one line per session, stage and failed call, as text or JSON, without keys and messages."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from polar_proxy.api_models import JobRequest
from polar_proxy.client import Client
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import EngineError
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store
from polar_proxy.terminal import JsonLogFormatter, configure_logging
from tests.cli.runner import polar_error, polar_json, polar_serve
from tests.cli.test_serve import CHAT
from tests.conftest import Serve
from tests.factories import new_rollout
from tests.gateway.websocket_client import LAST_EVENTS, request

KEY = "sk-a-secret-key-0123456789abcdef"
HOSTILE = "said \x1b]0;title\x07 \u202e\nINFO forged"


class QuotingEngine(ScriptedEngine):
    """An engine that fails, and quotes the request's messages in its error."""

    def __init__(self) -> None:
        super().__init__(lambda request: EngineError(f"bad request: {request}"))


class PickyEngine(ScriptedEngine):
    """An engine that fails on `CHAT`."""

    def __init__(self) -> None:
        super().__init__(lambda request: EngineError("bad request") if "hi[/]" in str(request) else "hello")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


def log_of_serve(*options: str) -> tuple[list[str], str]:
    """Serve an engine that fails, send it one request, and return the lines of the log and the session's id."""
    sessions = []

    def ask(ready: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(ready["url"] + "/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
        assert answer.status_code == 502
        sessions.append(answer.headers["x-polar-session-id"])

    done = polar_serve(ask, "--engine", "tests.cli.test_logs:QuotingEngine", *options)
    return done.stderr.splitlines(), sessions[0]


@pytest.mark.slow
def test_a_session_and_a_failed_call_are_one_line_each(polar_home: Path) -> None:
    lines, session_id = log_of_serve()
    opened, failed = (line for line in lines if session_id in line)
    assert re.fullmatch(rf"[-\d]+ [:\d]+ INFO session {session_id} opened \(request_id=req_\w+\)", opened)
    assert "WARNING call call_" in failed
    assert "failed after" in failed
    assert "HTTP status 502; `polar show call_" in failed
    assert not [line for line in lines if KEY in line or "hi[/]" in line]


def run_rollout_and_failing_call(ready: dict[str, Any]) -> None:
    """Run one rollout to its end, then send a request that the engine does not answer."""
    with Client(ready["url"], Path(ready["api_key_file"]).read_text().strip()) as client:
        job = client.submit(JobRequest(task="swe-task"))
        assert [event.event for event in client.events(job.job_id)][-1] == "end"
    headers = {"authorization": f"Bearer {KEY}"}
    httpx.post(ready["url"] + "/v1/chat/completions", json=CHAT, headers=headers, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json"])
def test_each_session_stage_and_failed_call_is_one_line(
    polar_home: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("POLAR_RUN__HARNESS", "tests.fakes.tiny_agent:BriefAgent")
    monkeypatch.setenv("POLAR_RUN__SANDBOX", "process")
    code = ("--allow-code", "tests.fakes.tiny_agent:BriefAgent", "--engine", "tests.cli.test_logs:PickyEngine")
    done = polar_serve(run_rollout_and_failing_call, "--rollout-workers", "1", "--log-format", form, *code)
    (rollout,) = polar_json("results", polar_json("status")["jobs"][0]["job_id"])["rollouts"]
    rollout_id = rollout["rollout_id"]
    newest, _ = polar_json("sessions")["sessions"]
    (call,) = polar_json("show", newest["session_id"])["calls"]
    *lines, stopped = done.stderr.splitlines()
    assert stopped == "stopped by SIGINT"
    messages = [orjson.loads(line)["message"] if form == "json" else line.split(" ", 3)[3] for line in lines]
    # The sandbox logs, besides, that it isolates nothing.
    found = sorted(message for message in messages if message.startswith(("call ", "rollout ", "session ")))
    expected = [
        f"call {call['call_id']} of session {newest['session_id']} failed after",
        *(f"rollout {rollout_id}: {stage}" for stage in ("preparing", "ready", "running", "scoring", "done")),
        f"session {newest['session_id']} opened",
        f"session {rollout['session_id']} of rollout {rollout_id} opened",
    ]
    assert len(found) == len(expected), messages
    for message, beginning in zip(found, sorted(expected), strict=True):
        assert message.startswith(beginning)


@pytest.mark.slow
def test_websockets_add_no_other_lines(polar_home: Path) -> None:
    """Two turns, a message that is no JSON, a client that vanishes, and one that is connected when the server stops."""
    headers = {"authorization": f"Bearer {KEY}"}
    with contextlib.ExitStack() as clients:

        def talk(ready: dict[str, Any]) -> None:
            url = ready["url"].replace("http", "ws", 1) + "/v1"
            staying = clients.enter_context(connect(f"{url}/responses", additional_headers=headers))
            for message in (request(input="hi"), request(input="more"), "{"):
                staying.send(message)
                while orjson.loads(staying.recv(timeout=60))["type"] not in LAST_EVENTS:
                    pass
            vanishing = clients.enter_context(connect(f"{url}/responses", additional_headers=headers))
            vanishing.socket.shutdown(socket.SHUT_RDWR)
            with pytest.raises(InvalidStatus):
                connect(f"{url}/chat/completions", additional_headers=headers)

        done = polar_serve(talk, "--engine", "scripted")
    line, stopped = done.stderr.splitlines()
    assert re.search(r"INFO session sess_\w+ opened", line)
    assert stopped == "stopped by SIGINT"


@pytest.mark.slow
def test_the_log_can_be_json_of_a_higher_level(polar_home: Path) -> None:
    lines, session_id = log_of_serve("--log-format", "json", "--log-level", "warning")
    assert lines.pop().startswith("stopped")
    (failed,) = (found for line in lines if (found := orjson.loads(line)).get("session_id") == session_id)
    assert (failed["level"], failed["status"], failed["http_status"]) == ("warning", "upstream_error", 502)
    assert KEY not in "".join(lines)
    assert "hi[/]" not in "".join(lines)


def test_a_hostile_message_stays_in_its_json_line() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("polar_proxy.x", logging.ERROR, "f", 1, "failed: %s", (HOSTILE,), sys.exc_info())
    record.fields = {"label": HOSTILE}
    line = JsonLogFormatter().format(record)
    assert not re.findall("[\x00-\x1f\x7f-\x9f\u202e]", line)
    document = orjson.loads(line)
    assert (document["message"], document["label"]) == (f"failed: {HOSTILE}", HOSTILE)
    assert document["traceback"].endswith(HOSTILE)


@pytest.mark.usefixtures("restored_logging")
def test_the_level_is_that_of_polar_and_libraries_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error")
    configure_logging("info")
    for name in ("polar_proxy.gateway", "httpx"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s %s", name, logging.getLevelName(level))
    shown = [line.split(" ", 3)[3] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["polar_proxy.gateway INFO", "polar_proxy.gateway WARNING", "httpx WARNING"]


@pytest.mark.parametrize("verb", [("serve",), ("run", "swe-task")], ids=["serve", "run"])
@pytest.mark.usefixtures("restored_logging")
def test_an_unknown_level_or_format_is_refused(polar_home: Path, verb: tuple[str, ...]) -> None:
    assert "log.level" in polar_error(*verb, "--log-level", "loud")
    assert "log.format" in polar_error(*verb, "--log-format", "xml")


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("form", ["text", "json"])
async def test_every_line_about_a_call_has_the_ids_of_call_session_rollout_and_request(
    serve: Serve, store: Store, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "sk-polar-rollout"
    rollout_id = await new_rollout(store)
    session = await store.sessions.create(key_hash=hash_key(key), label=None, origin="rollout", rollout_id=rollout_id)
    configure_logging("debug", form)
    async with serve(QuotingEngine()) as gateway, httpx.AsyncClient(timeout=60) as http:
        headers = {"authorization": f"Bearer {key}"}
        failed = await http.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=headers)
        refused = await http.post(f"{gateway.url}/v1/chat/completions", json={"model": 1}, headers=headers)
    lines = capsys.readouterr().err.splitlines()
    request_id = failed.headers["x-request-id"]
    (line,) = (one for one in lines if "failed after" in one)
    for name in (request_id, session.session_id, rollout_id):
        assert name in line
    (line,) = (one for one in lines if "was refused with status" in one)
    assert refused.headers["x-request-id"] in line
    if form == "json":
        found = orjson.loads(line)
        assert found["request_id"] == refused.headers["x-request-id"]
