"""A real llama-server for tests marked `by_command`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

ENVIRONMENT = Path(os.environ.get("POLAR_LLAMA", Path.home() / ".polar" / "llama-server" / "0.3.36"))
_SCRIPT = Path(__file__).parents[2] / "scripts" / "llama_server.sh"


def serve_llama(model_dir: Path, *flags: str) -> Iterator[str]:
    """Run a llama-server during the test, and yield its URL. Skip the test if it was not built."""
    if not (ENVIRONMENT / "bin" / "llama-server").exists():
        pytest.skip("no llama-server: run `make test-llama`, which builds it once")
    port = free_port()
    command = [str(_SCRIPT), "serve", str(ENVIRONMENT), str(model_dir), str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):  # limited by pytest's timeout
            assert process.poll() is None, "llama-server did not start"
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
