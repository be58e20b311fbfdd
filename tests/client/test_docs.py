"""The examples of docs/reference/api_examples.md are run against a real server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from polar_proxy.client import AsyncClient, Client
from polar_proxy.client.requests import api_method
from tests.cli.process import ROOT, environment
from tests.client.server import PolarServer, polar_serve

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "reference" / "api_examples.md").read_text()
GUIDE = (ROOT / "docs" / "guide" / "rollouts.md").read_text()
THERE = "http://127.0.0.1:8399"


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


@pytest.fixture
def server(polar_home: Path) -> Iterator[PolarServer]:
    with polar_serve(polar_home) as running:
        yield running


def run(command: list[str], script: str, server: PolarServer, folder: Path) -> str:
    program = script.replace(THERE, server.url).replace("~/.polar", str(server.home))
    env = environment() | {
        "POLAR_API_KEY": server.key,
        "PATH": f"{Path(sys.executable).parent}:{environment()['PATH']}",
    }
    done = subprocess.run(
        command, input=program, env=env, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(server.home / 'serve.log').read_text()}"
    return done.stdout


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="install curl and jq")
def test_shell_examples_run(server: PolarServer, tmp_path: Path) -> None:
    first, *rest = blocks("sh")
    assert "polar serve --rollout-workers 2 &" in first  # the fixture starts the server instead
    printed = run(["bash", "-seuo", "pipefail"], "\n".join(rest), server, tmp_path)
    assert re.search(r"^event: end$", printed, re.M)
    assert "acknowledged" in printed.split("returned")[1]
    assert printed.count("working") == 3  # the job, the server, and all servers
    rows = [orjson.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    assert len({row["rollout_id"] for row in rows}) == 2


def test_python_examples_run(server: PolarServer, tmp_path: Path) -> None:
    check = """
assert job.status == "done" and job.rollouts == {"done": 2}, job
assert [rollout.status for rollout in rollouts] == ["done"] * 2
assert {rollout.rollout_id for rollout in rollouts} <= {rollout.rollout_id for rollout in best}
assert [stage.stage for stage in stages] == ["preparing", "ready", "running", "scoring"]
assert polar.rollout(rollouts[0].rollout_id).reward == 0.5
assert polar.rollout(rollouts[0].rollout_id).rating == 4.0
assert len(rows) == rollouts[0].calls > 1
assert polar.feed().depth == {"delivered": 1}
assert polar.job(other.job_id).status == "cancelled"
assert session.key.startswith("sk-polar-")
assert polar.training_run("run_mine").series["eval"]["reward"] == [0.75]
"""
    (guide,) = blocks("python", GUIDE)
    printed = run([sys.executable, "-"], "\n".join([*blocks("python"), check, guide]), server, tmp_path)
    assert " end " in printed


def test_every_route_has_an_example() -> None:
    text = "\n".join(blocks("python"))
    named = {name for name in dir(Client) if isinstance(getattr(Client, name), api_method)}
    assert len(named) > 20
    assert {name for name in named if f"polar.{name}(" not in text} == set()
    assert {name for name in named if not hasattr(AsyncClient, name)} == set()
