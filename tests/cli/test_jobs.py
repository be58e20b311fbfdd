"""`polar submit`, `status`, `results` and `cancel` on a queue that nobody works on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from polar_proxy.cli.app import app
from polar_proxy.errors import UsageError


def polar(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return orjson.loads(done.stdout)


def test_a_job_that_nobody_works_on(polar_home: Path) -> None:
    asked = ("submit", "swe-task", "--seed", "3", "--samples", "3", "--group-size", "2", "--group-policy", "first_n")
    asked = (*asked, "--for-training", "--key", "k", "--label", "try", "--priority", "2")
    job = polar(*asked)
    assert (job["status"], job["rollouts"], job["priority"], job["new"]) == ("open", {"queued": 3}, 2, True)
    again = polar(*asked)
    assert (again["job_id"], again["new"]) == (job["job_id"], False)
    with pytest.raises(UsageError, match="was used for another job"):
        polar("submit", "swe-task", "--seed", "4", "--key", "k")

    rows = polar("results", job["job_id"])["rollouts"]
    assert [(row["status"], row["attempt"], row["masked"], row["calls"]) for row in rows] == [
        ("queued", 1, False, 0)
    ] * 3
    assert polar("cancel", rows[0]["rollout_id"])["in_flight"] == []
    one = polar("status", job["job_id"])
    assert one["rollouts"] == {"cancelled": 1, "queued": 2}
    assert [(group["wanted"], group["size"], group["status"]) for group in one["groups"]] == [(2, 3, "open")]
    assert polar("status")["feed"] == {"open": 1}

    assert polar("cancel", job["job_id"])["in_flight"] == []
    stands = polar("status", "--state", "cancelled")
    assert [(one["label"], one["rollouts"]) for one in stands["jobs"]] == [("try", {"cancelled": 3})]
    assert stands["feed"] == {"dropped": 1}


def test_what_cannot_be(polar_home: Path) -> None:
    polar("submit", "swe-task")
    for arguments, words in (
        (("submit", "swe-task", "--samples", "2", "--group-size", "3"), "needs at least as many samples"),
        (("submit", "swe-task", "--group-policy", "luck"), "no policy 'luck'"),
        (("submit", "swe-task", "--seed", "1", "--instances", "2"), "not both"),
        (("submit", "swe-task", "--harness", "no-such"), "no-such"),
        (("cancel", "roll_none"), "no job, group or rollout"),
        (("results", "job_none"), "no job job_none"),
        (("status", "--state", "tired"), "no job state 'tired'"),
    ):
        with pytest.raises(UsageError, match=words):
            polar(*arguments)
    refused = CliRunner().invoke(app, ["submit", "swe-task", "--overflow", "sell"])
    assert (refused.exit_code, "'cancel', 'keep'" in " ".join(refused.output.replace("│", " ").split())) == (2, True)


def test_all_servers_of_a_database(polar_home: Path) -> None:
    polar("submit", "swe-task")
    assert polar("service", "status")["fleet"] == {"state": "working", "in_flight": 0, "paused_until": None}
    paused = polar("service", "pause", "--all", "--for", "600")["fleet"]
    assert (paused["state"], paused["paused_until"] is not None) == ("paused", True)
    polar("submit", "swe-task")
    assert polar("service", "status")["fleet"] == paused
    assert polar("service", "resume", "--all")["fleet"]["state"] == "working"
    assert polar("service", "drain", "--all", "--timeout", "5")["fleet"]["state"] == "paused"
    assert polar("service", "resume", "--all")["fleet"]["state"] == "working"
