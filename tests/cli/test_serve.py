"""`polar serve` in its own process: started, used, stopped; then its records are read with the other commands."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.cli.process import POLAR, environment
from tests.cli.runner import polar_json, polar_ok, polar_serve, polar_serve_text
from tests.ports import free_port
from tests.rewards.conftest import needs
from tests.until import until

pytestmark = pytest.mark.slow

CHAT = {"model": "m", "messages": [{"role": "user", "content": "say [bold]hi[/]"}]}


Serving = tuple[subprocess.Popen[str], dict[str, Any]]
"""The running process and the JSON document that it printed when it was ready."""


@pytest.fixture
def serving(polar_home: Path, tmp_path: Path) -> Iterator[Serving]:
    with serve(tmp_path) as running:
        yield running


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[Serving]:
    with subprocess.Popen(
        [POLAR, "serve", "--engine", "scripted", "--port", "0", "--json", *options],
        env=environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            printed = ""
            while not printed.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, "polar serve ended before it was ready"
                printed += line
            yield process, orjson.loads(printed)
        finally:
            process.kill()


def test_serves_until_interrupted_and_records_calls(serving: Serving, polar_home: Path, tmp_path: Path) -> None:
    process, ready = serving
    assert ready["model"] == "scripted-model"
    assert ready["open"] is True
    check_api_keys(ready, polar_home)
    answer = httpx.post(ready["url"] + "/v1/chat/completions", json=CHAT, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert answer.headers["x-polar-session-id"] in httpx.get(ready["url"], timeout=60).text
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr

    call_id, session_id = answer.headers["x-polar-call-id"], answer.headers["x-polar-session-id"]
    call = polar_json("show", call_id)
    assert (call["call_id"], call["status"], call["messages"]) == (call_id, "ok", CHAT["messages"])
    assert len(call["choices"][0]["token_ids"]) == len(call["choices"][0]["logprobs"]) == len("hello") + 1
    assert call_id in polar_ok("show", session_id)
    printed = polar_ok("show", call_id, "--tokens")
    assert "say [bold]hi[/]" in printed
    assert "107:-0.108" in printed  # "h" and its log-probability

    report = polar_json("export", "--format", "tokens-jsonl", "--out", "rows.jsonl")
    assert (report["rows"], report["sessions"], report["left_out"]) == (1, 1, {})
    row = orjson.loads((tmp_path / "rows.jsonl").read_bytes())
    assert row["prompt_ids"] == call["prompt_ids"]
    assert row["response_ids"] == call["choices"][0]["token_ids"]


def test_serve_and_show_note_answers_of_another_distribution(polar_home: Path) -> None:
    def ask(ready: dict[str, Any]) -> None:
        for options in ({}, {"temperature": 0}, {"temperature": 0}, {"top_p": 0.9}):
            httpx.post(ready["url"] + "/v1/chat/completions", json=CHAT | options, timeout=60).raise_for_status()

    served = polar_serve(ask, "--engine", "scripted")
    zero, cut = (line for line in served.stderr.splitlines() if "their traces are approximate" in line)
    assert "sampled with temperature 0," in zero
    assert "sampled with top_p 0.9," in cut
    shown = " ".join(polar_ok("show", "last").split())
    for note in (zero, shown):
        assert "With --temperature 1, polar serve, run and session new sample from the model's own" in note


def test_answers_only_when_its_key_works(polar_home: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        subprocess.Popen(
            [POLAR, "serve", "--engine", "scripted", "--port", str(port), "--rollout-workers", "1"],
            env=environment(),
            cwd=tmp_path,
        ) as process,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        try:
            asyncio.run(until(lambda: answers(http), "an answer of the server"))
            admin = {"authorization": f"Bearer {(polar_home / 'api-key').read_text().strip()}"}
            assert http.get("/api/v1/service", headers=admin).status_code == 200
        finally:
            process.terminate()


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.parametrize("kind", [needs("bubblewrap")])
def test_starts_no_work_in_a_sandbox_that_leaks(
    kind: str, polar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is tested when the server starts, before there is any rollout."""
    (tmp_path / "bin").mkdir()
    sharing = tmp_path / "bin" / "bwrap"  # a bwrap that keeps the host's network
    sharing.write_text(
        f'#!/bin/sh\nfor o; do shift; [ "$o" != -- ] || set -- "$@" --share-net; set -- "$@" "$o"; done\n'
        f'exec {shutil.which("bwrap")} "$@"\n'
    )
    sharing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sharing.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("POLAR_RUN__SANDBOX", kind)
    with serve(tmp_path, "--rollout-workers", "1") as (process, ready):
        admin = {"authorization": f"Bearer {Path(ready['api_key_file']).read_text().strip()}"}
        state = httpx.get(ready["url"] + "/api/v1/service", headers=admin, timeout=60).json()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert state["state"] == "paused"
    assert "the host's loopback interface answers" in state["problem"]
    assert "this worker claims no rollouts: The bubblewrap sandbox fails its self-test" in stderr


def check_api_keys(ready: dict[str, Any], polar_home: Path) -> None:
    """The server's own user has a key; new keys work without a restart, within their role."""
    file = Path(ready["api_key_file"])
    assert file == polar_home / "api-key"
    assert file.stat().st_mode & 0o777 == 0o600
    with httpx.Client(base_url=f"{ready['url']}/api/v1", trust_env=False, timeout=60) as http:
        assert http.get("/service").status_code == 401
        admin = {"authorization": f"Bearer {file.read_text().strip()}"}
        state = http.get("/service", headers=admin).json()
        assert (state["engine"]["model"], state["state"]) == ("scripted-model", None)
        trainer = {"authorization": f"Bearer {polar_json('key', 'new', '--role', 'trainer')['key']}"}
        assert http.get("/feed", headers=trainer).status_code == 200
        assert http.post("/sessions", json={}, headers=trainer).status_code == 403


ASK = f"""python - <<'END'
import os, httpx
headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
httpx.post(url, json={CHAT}, headers=headers, timeout=60).raise_for_status()
END"""


@pytest.mark.parametrize("keys", [(), ("--require-known-keys",)], ids=["open", "known keys"])
def test_the_printed_lines_work_with_another_database(polar_home: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """The lines are run in a shell without the server's --db; without known keys, only the first of the verbs is."""

    def run_lines(printed: str) -> None:
        exports = [line for line in printed.splitlines() if line.startswith("  export ")]
        verbs = re.findall(r"polar [a-z ]+", printed.splitlines()[-1])
        assert verbs == ["polar sessions", "polar show last", "polar export"]
        done = subprocess.run(
            ["bash", "-euc", "\n".join([*exports, ASK, *(verbs if keys else verbs[:1])])],
            env=environment() | {"PATH": f"{Path(POLAR).parent}:{os.environ['PATH']}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("any-name-you-like" in done.stdout) == (not keys)
        if keys:
            assert "say [bold]hi[/]" in done.stdout.splitlines()[-1]
            assert "1 rows from 0 rollouts and 1 other sessions" in done.stderr

    served = polar_serve_text(run_lines, "--engine", "scripted", "--db", str(tmp_path / "my runs.db"), *keys)
    assert served.exit_code == 130
    assert not (polar_home / "polar.db").exists()
