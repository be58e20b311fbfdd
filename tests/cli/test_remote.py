"""The job commands against a real server and against its database give the same results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_proxy.cli import common
from tests.cli.process import ROOT
from tests.cli.runner import polar, polar_error, polar_json, polar_ok
from tests.client.server import PolarServer, polar_serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolarServer]:
    """One server for all tests of this file, with its own home."""
    home = tmp_path_factory.mktemp("server") / "polar-home"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("POLAR_HOME", str(home))
        environment.setenv("POLAR_DB", f"sqlite:///{home}/polar.db")
        with polar_serve(home) as running:
            yield running


@pytest.fixture
def at_server(server: PolarServer, monkeypatch: pytest.MonkeyPatch) -> PolarServer:
    """Make commands use the server, with its home, so that they find its key."""
    monkeypatch.setenv("POLAR_HOME", str(server.home))
    monkeypatch.setenv("POLAR_DB", f"sqlite:///{server.home}/polar.db")
    monkeypatch.setenv("POLAR_URL", server.url)
    return server


def events_of(job_id: str, *options: str) -> list[Any]:
    return [orjson.loads(line) for line in polar_ok("events", job_id, *options).splitlines()]


def test_a_job_from_submission_to_its_rewards(at_server: PolarServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is given: on this machine the server's own key file is used."""
    job = polar_json("submit", "swe-task", "--seed", "3", "--samples", "2", "--label", "far")
    job_id = job["job_id"]
    watched = polar("watch", job_id)
    assert (watched.exit_code, watched.stdout) == (0, f"{job_id} is done: 2 done\n")
    lines = watched.stderr.splitlines()
    for stage in ("preparing", "running", "scoring", "done"):
        assert sum(bool(re.search(rf" roll_\w+: {stage}\b", line)) for line in lines) == 2, lines
    assert polar_json("watch", job_id)["rollouts"] == {"done": 2}
    rollouts = polar_json("results", job_id)["rollouts"]
    assert [(row["status"], row["reward"]) for row in rollouts] == [("done", 1.0)] * 2

    events = events_of(job_id)
    # `end` has the id of the event before it, so a client that continues after that event gets `end` again.
    assert (events[-1]["event"], events[-1]["id"]) == ("end", events[-2]["id"])
    assert len({event["id"] for event in events}) == len(events) - 1
    assert events_of(job_id, "--after", events[3]["id"]) == events[4:]

    reward = ("reward", rollouts[0]["rollout_id"], "0.25", "--source", "human:anna", "--detail", '{"why": "slow"}')
    given = polar_json(*reward)
    assert (given["value"], given["source"], given["detail"]) == (0.25, "human:anna", {"why": "slow"})

    remarked = polar_json("remark", rollouts[0]["rollout_id"], "--label", "odd", "--rating", "4", "--note", "Why?")
    assert [(one["kind"], one["text"], one["value"]) for one in remarked] == [
        ("label", "odd", None),
        ("note", "Why?", None),
        ("rating", None, 4.0),
    ]
    assert all(one["author"].startswith("made by polar serve") for one in remarked)
    assert "Why?" in polar_ok("show", rollouts[0]["rollout_id"])

    far, status = polar_json("results", job_id), polar_json("status", job_id)
    assert [row["reward"] for row in far["rollouts"]] == [0.25, 1.0]
    monkeypatch.delenv("POLAR_URL")  # the same commands on the database itself
    assert polar_json("results", job_id) == far
    assert polar_json("status", job_id) == status
    assert events_of(job_id) == events


def test_sessions_and_exports_are_those_of_the_server(
    at_server: PolarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = polar_json("session", "new", "--label", "over http", "--max-tokens", "5")
    assert created["key"].startswith("sk-polar-")
    job_id = polar_json("submit", "swe-task", "--seed", "4")["job_id"]
    polar_json("watch", job_id)
    (row,) = polar_json("results", job_id)["rollouts"]
    key = polar_json("key", "new", "--role", "trainer", "--label", "gpu box")
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"

    def read(path: Path) -> list[Any]:
        report = polar_json("export", "--session", row["session_id"], "--out", str(path))
        shown = [polar_json("show", name) for name in ("over http", row["rollout_id"][:-2], "last")]
        return [polar_json("sessions"), polar_json("key", "list"), *shown, report["rows"], report["left_out"]]

    far = read(there)
    assert key["name"] in str(far[1])
    assert (far[2]["session_id"], far[3]["reward"]) == (created["session_id"], 1.0)
    monkeypatch.delenv("POLAR_URL")
    assert read(here) == far
    assert here.read_bytes() == there.read_bytes() != b""
    monkeypatch.setenv("POLAR_URL", at_server.url)
    monkeypatch.setenv("POLAR_DB", "another.db")  # is not used
    assert polar_json("sessions", "--url", at_server.url) == far[0]
    assert polar("export", "--where", "harness=none").exit_code == 3
    assert "tokens-jsonl" in polar_error("export", "--format", "nope")
    assert "begins with 'nobody'" in polar_error("show", "nobody")
    assert polar_json("key", "revoke", key["name"])["revoked_at"] is not None


def test_a_relative_file_of_tasks_is_found_by_the_server(at_server: PolarServer, tmp_path: Path) -> None:
    lines = (ROOT / "examples" / "tasks" / "jsonl" / "tasks.jsonl").read_text().splitlines()
    (tmp_path / "mine.jsonl").write_text(f'{lines[1]}\n{{"id": "broken"}}\n')
    job = polar_json("submit", "mine.jsonl", "--harness", "shell:true")
    assert (job["groups"], len(job["refused"])) == (1, 1)
    assert job["refused"][0]["where"].endswith("mine.jsonl:2")
    polar_json("cancel", job["job_id"])


def test_a_file_without_a_usable_task_is_refused(at_server: PolarServer, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "broken"}\n')
    error = polar_error("submit", "bad.jsonl")
    assert "(1 refused)" in error
    assert "bad.jsonl:1" in error
    assert "nothing.jsonl" in polar_error("submit", "nothing.jsonl")


def test_reports_refusals_of_the_server(at_server: PolarServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no job job_none" in polar_error("results", "job_none")
    assert "not both" in polar_error("status", "--url", at_server.url, "--db", "x.db")
    assert "is not the URL of a server" in polar_error("status", "--url", "localhost")
    monkeypatch.setenv("POLAR_API_KEY", "polar-admin-none")
    assert f"This key is unknown in sqlite:///{at_server.home}/polar.db" in polar_error("status")


def test_reports_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar_proxy.client.requests.MAX_PAUSE_SECONDS", 0.01)
    assert "Is `polar serve` running there" in polar_error("status", "--url", "http://127.0.0.1:9")


def test_the_stored_key_is_used_on_this_machine_only(polar_home: Path) -> None:
    polar_home.mkdir(parents=True)
    (polar_home / "api-key").write_text("polar-admin-here\n")

    def key(url: str, **changes: Any) -> str | None:
        settings = common.load_client_settings(url, None)
        return common.api_key_for(settings.model_copy(update=changes))

    for url in ("http://127.0.0.1:8399", "http://localhost:8399", "http://[::1]:8399"):
        assert key(url) == "polar-admin-here"
    assert key("https://polar.example.com") is None
    assert key("https://polar.example.com", api_key="given") == key("http://127.0.0.1:1", api_key="given") == "given"
