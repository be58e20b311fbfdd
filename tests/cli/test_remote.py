"""The verbs about jobs against a real server, and the same verbs over a database: one code path, one result."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from polar_proxy.cli import common
from polar_proxy.cli.app import app
from polar_proxy.client import UnauthorisedError, UnreachableError
from polar_proxy.errors import UsageError
from tests.cli.process import POLAR, ROOT, environment
from tests.cli.test_jobs import polar
from tests.client.server import PolarServer, polar_serve


def lines(*arguments: str) -> list[str]:
    """What a command printed that has no --json."""
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


@pytest.fixture
def server(polar_home: Path) -> Iterator[PolarServer]:
    with polar_serve(polar_home) as running:
        yield running


def test_a_job_from_submission_to_its_rows(
    server: PolarServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is said of a key: on this machine the server's own file is used."""
    monkeypatch.setenv("POLAR_URL", server.url)
    job = polar("submit", "swe-task", "--seed", "3", "--samples", "2", "--label", "far")
    watching = subprocess.run(
        [POLAR, "watch", job["job_id"]], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert watching.returncode == 0, watching.stderr
    assert watching.stdout == f"{job['job_id']} is done: 2 done\n"
    rollouts = polar("results", job["job_id"])["rollouts"]
    assert [(row["status"], row["reward"]) for row in rollouts] == [("done", 1.0)] * 2
    told = watching.stderr.splitlines()
    for stage in ("preparing", "running", "scoring", "done"):
        assert sum(line.endswith(f": {stage}") and line.startswith("roll_") for line in told) == 2, told
    assert polar("watch", job["job_id"])["rollouts"] == {"done": 2}

    events = [orjson.loads(line) for line in lines("events", job["job_id"])]
    # The end stands where the last happening does: who saw that one is told the end again.
    assert (events[-1]["event"], events[-1]["id"]) == ("end", events[-2]["id"])
    assert len({event["id"] for event in events}) == len(events) - 1
    behind = [orjson.loads(line) for line in lines("events", job["job_id"], "--after", events[3]["id"])]
    assert behind == events[4:]

    given = polar("reward", rollouts[0]["rollout_id"], "0.25", "--source", "human:anna", "--detail", '{"why": "slow"}')
    assert (given["value"], given["source"], given["detail"]) == (0.25, "human:anna", {"why": "slow"})
    # The database itself, without the server: the same verbs, the same answers.
    monkeypatch.delenv("POLAR_URL")
    near = polar("results", job["job_id"])
    assert [row["reward"] for row in near["rollouts"]] == [0.25, 1.0]
    assert [orjson.loads(line) for line in lines("events", job["job_id"])] == events
    assert polar("results", job["job_id"], "--url", server.url) == near
    assert polar("status", job["job_id"], "--url", server.url) == polar("status", job["job_id"])


def test_a_file_of_tasks_is_found_from_where_the_server_runs(
    server: PolarServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It runs in another folder. What cannot be a task is named by its line; the others are queued."""
    lines_of = (ROOT / "examples" / "tasks" / "jsonl" / "tasks.jsonl").read_text().splitlines()
    (tmp_path / "mine.jsonl").write_text(f'{lines_of[1]}\n{{"id": "broken"}}\n')
    monkeypatch.chdir(tmp_path)
    job = polar("submit", "mine.jsonl", "--url", server.url, "--harness", "shell:true")
    assert (job["groups"], len(job["refused"])) == (1, 1)
    assert job["refused"][0]["where"].endswith("mine.jsonl:2")
    polar("cancel", job["job_id"], "--url", server.url)
    (tmp_path / "bad.jsonl").write_text('{"id": "broken"}\n')
    told = CliRunner().invoke(app, ["submit", "bad.jsonl", "--url", server.url])
    assert isinstance(told.exception, UsageError)
    assert "(1 refused)" in str(told.exception)
    assert "bad.jsonl:1" in told.stderr
    with pytest.raises(UsageError, match=r"nothing\.jsonl"):
        polar("submit", "nothing.jsonl", "--url", server.url)


def test_who_may_not_and_what_is_not_there(server: PolarServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_API_KEY", "polar-admin-none")
    with pytest.raises(UnauthorisedError):
        polar("status", "--url", server.url)
    monkeypatch.delenv("POLAR_API_KEY")
    with pytest.raises(UsageError, match="There is no job job_none"):
        polar("results", "job_none", "--url", server.url)
    with pytest.raises(UsageError, match="not both"):
        polar("status", "--url", server.url, "--db", "x.db")
    with pytest.raises(UsageError, match="is not the URL of a server"):
        polar("status", "--url", "localhost")


def test_a_server_that_is_not_there(polar_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar_proxy.client.requests.MAX_PAUSE_SECONDS", 0.01)
    with pytest.raises(UnreachableError, match="Is `polar serve` running there"):
        polar("status", "--url", "http://127.0.0.1:9")


def test_pauses_of_a_job_that_nobody_works_on(polar_home: Path) -> None:
    job = polar("submit", "swe-task")["job_id"]
    assert polar("pause", job, "--for", "600")["status"] == "paused"
    assert polar("status", job)["paused_until"] > 0
    assert polar("resume", job)["status"] == "open"
    assert polar("pause", job, "--wait-idle", "5")["status"] == "paused"
    polar("resume", job)
    assert polar("cancel", job)["in_flight"] == []
    done = CliRunner().invoke(app, ["watch", job], catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (1, f"{job} is cancelled: 1 cancelled\n")


def test_the_key_of_this_machine_stays_here(polar_home: Path) -> None:
    polar_home.mkdir(parents=True)
    (polar_home / "api-key").write_text("polar-admin-here\n")

    def key(url: str, **more: Any) -> str | None:
        settings = common.load_client_settings(url, None)
        return common.api_key_for(settings.model_copy(update=more))

    for url in ("http://127.0.0.1:8399", "http://localhost:8399", "http://[::1]:8399"):
        assert key(url) == "polar-admin-here"
    assert key("https://polar.example.com") is None
    assert key("https://polar.example.com", api_key="given") == key("http://127.0.0.1:1", api_key="given") == "given"
