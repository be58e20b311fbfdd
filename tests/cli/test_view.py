"""`polar view` in its own process, and the addresses that it prints."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import httpx
import orjson
import pytest

from tests.cli.process import POLAR, environment
from tests.cli.runner import polar_error, polar_json, polar_ok

pytestmark = pytest.mark.slow


def test_serves_the_pages_of_a_database_until_interrupted(polar_home: Path, tmp_path: Path) -> None:
    session = polar_json("session", "new", "--label", "my-agent")["session_id"]
    command = [POLAR, "view", "my-agent", "--no-browser", "--json"]
    with subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = orjson.loads("".join(process.stdout.readline() for _ in range(3)))["url"]
            answer = httpx.get(url, follow_redirects=True, timeout=60)
            assert answer.url.path == f"/view/sessions/{session}"
            assert "my-agent" in answer.text
            assert httpx.get(url, headers={"host": "evil.example"}, timeout=60).status_code == 403
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_names_the_page_of_a_server(polar_home: Path) -> None:
    url = "http://127.0.0.1:9"
    assert polar_ok("view", "--url", url, "--no-browser") == f"{url}/\n"
    found = polar_json("view", "a b&c", "--url", f"{url}/", "--no-browser")
    assert found == {"url": f"{url}/view/find?name=a+b%26c"}


def test_a_missing_database_and_a_taken_port_are_errors(polar_home: Path) -> None:
    assert "no database" in polar_error("view", "--no-browser", "--db", "missing.db").lower()
    polar_ok("db", "upgrade")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = polar_error("view", "--no-browser", "--port", str(taken.getsockname()[1]))
    assert "Choose another port with --port" in error
