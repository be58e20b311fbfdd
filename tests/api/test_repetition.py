"""Repetitions over HTTP: task and options of a recorded rollout, in a new job that names it."""

from __future__ import annotations

from typing import Any

import pytest

from polar_proxy.store import RolloutRow
from tests.api.conftest import RunningServer, ServeApi, job_request
from tests.factories import new_session

pytestmark = pytest.mark.slow


async def queue(running: RunningServer, body: dict[str, Any]) -> list[RolloutRow]:
    job = await running.post("/jobs", body, status=201)
    return await running.store.rollouts.find(job_id=job["job_id"])


async def test_a_repetition_has_task_agent_and_options_of_the_original(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        options = {"temperature": 0.5, "timeout": 77.0, "max_calls": 9, "sandbox": "bubblewrap"}
        (original,) = await queue(running, {"task": "swe-task", "seed": 3, **options})
        first, second = await queue(running, {"repeat_of": original.rollout_id, "samples": 2, "timeout": 5})
        for row in (first, second):
            assert (row.task_id, row.seed, row.harness) == (original.task_id, 3, original.harness)
            assert row.config["harness"] == original.harness.replace(" ", "@")
            changed = {name for name, value in original.config.items() if row.config[name] != value}
            assert changed == {"harness", "timeout", "sandbox"}
            assert (row.config["timeout"], row.config["sandbox"]) == (5.0, "process")  # the server's own
        assert (await running.get(f"/jobs/{first.job_id}"))["repeat_of"] == original.rollout_id


async def test_an_agent_that_is_code_or_a_command_must_be_named_again(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        for agent in (job_request()["harness"], "shell:true"):
            (original,) = await queue(running, {**job_request(), "harness": agent})
            body = {"repeat_of": original.rollout_id}
            error = (await running.post("/jobs", body, status=400))["error"]
            assert f"{agent!r}, which is a command or Python code" in error["message"]
            (row,) = await queue(running, {**body, "harness": agent})
            assert row.config["harness"] == agent


async def test_a_stored_task_may_name_only_allowed_code(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        (original,) = await queue(running, {"task": "swe-task", "seed": 3})
        task = await running.store.tasks.get(original.task_id)
        assert task is not None
        spec = {**task.spec, "evaluators": [{"kind": "python", "function": "os:getcwd"}]}
        await running.store.tasks.put(task.task_id, task.family, task.seed, task.instruction, spec)
        error = (await running.post("/jobs", {"repeat_of": original.rollout_id}, status=400))["error"]
        assert "os:getcwd is not allowed" in error["message"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"task": "swe-task"}, 422, "give one of task, task_specs and repeat_of"),
        ({"seed": 1}, 422, "seed can be given with task only"),
        ({"instances": 2}, 422, "instances cannot be given with repeat_of"),
        ({"repeat_of": "roll_none"}, 404, "roll_none"),
        ({"repeat_of": "last"}, 400, "last is a session. Only a rollout can be repeated"),
    ],
)
async def test_rejects_invalid_repetitions(
    serve_api: ServeApi, change: dict[str, Any], status: int, message: str
) -> None:
    async with serve_api() as running:
        (original,) = await queue(running, {"task": "swe-task", "seed": 3})
        await new_session(running.store)
        error = (await running.post("/jobs", {"repeat_of": original.rollout_id, **change}, status=status))["error"]
        assert message in error["message"]
