"""`polar serve` as a user runs it: started, asked, stopped; then looked at with the other verbs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.cli.process import POLAR, environment, polar, polar_json

ENGINE = "polar_proxy.engines.scripted:ScriptedEngine"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "say [bold]hi[/]"}]}


@pytest.fixture
def serving(polar_home: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The running process and what it said when it was ready."""
    with subprocess.Popen(
        [POLAR, "serve", "--engine", ENGINE, "--port", "0", "--json"],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = ""
            while not said.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, "polar serve ended before it was ready"
                said += line
            yield process, orjson.loads(said)
        finally:
            process.kill()


def test_serve_ask_stop_look(serving: tuple[subprocess.Popen[str], dict[str, Any]], tmp_path: Path) -> None:
    process, ready = serving
    assert ready["model"] == "scripted-model"
    assert ready["open"] is True
    answer = httpx.post(ready["url"] + "/v1/chat/completions", json=CHAT, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    process.send_signal(signal.SIGINT)
    rest, complaint = process.communicate(timeout=120)
    assert process.returncode == 130
    assert rest == ""
    assert "Traceback" not in complaint

    call_id, session_id = answer.headers["x-polar-call-id"], answer.headers["x-polar-session-id"]
    call = polar_json("show", call_id, cwd=tmp_path)
    assert (call["call_id"], call["status"], call["messages"]) == (call_id, "ok", CHAT["messages"])
    assert len(call["choices"][0]["token_ids"]) == len(call["choices"][0]["logprobs"]) == len("hello") + 1
    shown = polar("show", session_id, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert call_id in shown.stdout
    said = polar("show", call_id, "--tokens", cwd=tmp_path)
    assert "say [bold]hi[/]" in said.stdout
    assert "107:-0.108" in said.stdout  # "h" and its log-probability

    report = polar_json("export", "--format", "tokens-jsonl", "--out", "rows.jsonl", cwd=tmp_path)
    assert (report["rows"], report["sessions"], report["left_out"]) == (1, 1, {})
    row = orjson.loads((tmp_path / "rows.jsonl").read_bytes())
    assert row["prompt_ids"] == call["prompt_ids"]
    assert row["response_ids"] == call["choices"][0]["token_ids"]


def test_version(tmp_path: Path) -> None:
    from polar_proxy import __version__

    done = polar("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"polar {__version__}\n")
