"""`polar submit`, `status`, `results`, `watch`, `cancel` and `pause` on a database without a server."""

from __future__ import annotations

import pytest

from tests.cli.runner import polar, polar_error, polar_json

pytestmark = pytest.mark.slow


def test_a_queued_job_from_submission_to_cancellation() -> None:
    command = ("submit", "swe-task", "--seed", "3", "--samples", "3", "--group-size", "2", "--group-policy", "first_n")
    command = (*command, "--for-training", "--key", "k", "--label", "try", "--priority", "2")
    job = polar_json(*command)
    assert (job["status"], job["rollouts"], job["priority"], job["new"]) == ("open", {"queued": 3}, 2, True)
    again = polar_json(*command)
    assert (again["job_id"], again["new"]) == (job["job_id"], False)
    assert "was used for another job" in polar_error("submit", "swe-task", "--seed", "4", "--key", "k")

    rows = polar_json("results", job["job_id"])["rollouts"]
    assert [(row["status"], row["attempt"], row["masked"], row["calls"]) for row in rows] == [
        ("queued", 1, False, 0)
    ] * 3
    assert polar_json("cancel", rows[0]["rollout_id"])["in_flight"] == []
    detail = polar_json("status", job["job_id"])
    assert detail["rollouts"] == {"cancelled": 1, "queued": 2}
    (group,) = detail["groups"]
    assert (group["group_size"], group["rollout_count"], group["status"]) == (2, 3, "open")
    assert polar_json("status")["feed"] == {"open": 1}

    assert polar_json("cancel", job["job_id"])["in_flight"] == []
    cancelled = polar_json("status", "--state", "cancelled")
    assert [(one["label"], one["rollouts"]) for one in cancelled["jobs"]] == [("try", {"cancelled": 3})]
    assert cancelled["feed"] == {"dropped": 1}


def test_a_job_is_paused_and_resumed() -> None:
    job = polar_json("submit", "swe-task")["job_id"]
    assert polar_json("pause", job, "--for", "600")["status"] == "paused"
    assert polar_json("status", job)["paused_until"] > 0
    assert polar_json("resume", job)["status"] == "open"
    assert polar_json("pause", job, "--wait-idle", "5")["status"] == "paused"


def test_watching_a_cancelled_job_fails() -> None:
    job = polar_json("submit", "swe-task")["job_id"]
    polar_json("cancel", job)
    watched = polar("watch", job)
    assert (watched.exit_code, watched.stdout) == (1, f"{job} is cancelled: 1 cancelled\n")


def test_reports_invalid_options() -> None:
    polar_json("submit", "swe-task")
    for arguments, message in (
        (("submit", "swe-task", "--samples", "2", "--group-size", "3"), "needs at least 3 samples"),
        (("submit", "swe-task", "--group-policy", "luck"), "no policy 'luck'"),
        (("submit", "swe-task", "--overflow", "sell"), "'cancel', 'keep'"),
        (("submit", "swe-task", "--harness", "no-such"), "no-such"),
        (("cancel", "roll_none"), "no job, group or rollout"),
        (("results", "job_none"), "no job job_none"),
        (("status", "--state", "tired"), "no job state 'tired'"),
        (("reward", "roll_none", "much", "--source", "me"), "VALUE must be a number or `none`"),
        (("remark", "roll_none"), "Give --label, --note or --rating"),
        (("remark", "roll_none", "--label", "odd"), "no rollout roll_none"),
    ):
        assert message in polar_error(*arguments), arguments


def test_a_repetition_is_submitted() -> None:
    job = polar_json("submit", "swe-task", "--seed", "3", "--temperature", "0.5")
    (original,) = polar_json("results", job["job_id"])["rollouts"]
    again = polar_json("submit", "--repeat-of", original["rollout_id"], "--samples", "2")
    rows = polar_json("results", again["job_id"])["rollouts"]
    assert [row["task_id"] for row in rows] == [original["task_id"]] * 2
    for arguments in (("swe-task", "--repeat-of", original["rollout_id"]), ()):
        assert "ive one of task, task_specs and repeat_of" in polar_error("submit", *arguments)
        assert "Give TASK or --repeat-of, not both" in polar_error("run", *arguments)


def test_seed_and_instances_submit_the_instances_from_the_seed_on() -> None:
    job = polar_json("submit", "swe-task", "--seed", "500", "--instances", "4")
    assert job["groups"] == 4
    rows = polar_json("results", job["job_id"])["rollouts"]
    assert sorted(row["seed"] for row in rows) == [500, 501, 502, 503]
