"""Repetitions: the task of a recorded rollout is run again, with the same agent, agent version and options.

A repetition samples again. Engine and kind of sandbox come from the settings, because they belong to the machine. The
job of a repetition names the original (`JobSpec.repeat_of`), so that pages can link to the comparison of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polar_proxy.allowed_code import is_code
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.store import RolloutRow, Store
from polar_proxy.tasks import Task, task_from_json
from polar_proxy.types import Json


@dataclass(frozen=True, slots=True)
class Original:
    """A rollout to repeat, and its stored task. Pass this task to `check_task` before it is used."""

    row: RolloutRow
    task: Task

    def job_options(self, given: Mapping[str, object]) -> Json:
        """Return the fields of a `JobSpec` that repeats the rollout. `given`: the options that replace the rollout's
        own.

        Raises UsageError if the rollout's agent is a command or Python code and `given` has no `harness`, because a
        stored row must not decide which code this machine runs.
        """
        own = RolloutSpec.read(self.row.config)
        if "harness" not in given and (own.harness.startswith("shell:") or is_code(own.harness)):
            raise UsageError(
                f"The agent of {self.row.rollout_id} is {own.harness!r}, which is a command or Python code. Polar does "
                "not take such an agent from a database: if you trust it, give it with the option harness."
            )
        name, _, version = self.row.harness.rpartition(" ")
        # A name without a version means the newest version that Polar knows, which may be another one today.
        harness = f"{name}@{version}" if own.harness == name else own.harness
        options = own.model_dump(mode="json", exclude={"sandbox"}) | {"harness": harness}
        return {**options, **given, "repeat_of": self.row.rollout_id}


async def find_original(store: Store, name: str) -> Original:
    """Return the rollout that `name` refers to (see `store.names`).

    Raises UsageError if no record or several records have this name, or if the record is not a rollout.
    """
    found = await store.names.find(name)
    row = await store.rollouts.get(found.record_id) if found.kind == "rollout" else None
    stored = None if row is None else await store.tasks.get(row.task_id)
    if row is None or stored is None:
        raise UsageError(f"{name} is a {found.kind}. Only a rollout can be repeated.")
    return Original(row, task_from_json(stored.spec))
