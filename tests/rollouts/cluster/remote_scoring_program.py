"""Scores on a Ray cluster and prints the results as JSON. Run by test_cluster.py."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from typing import Any

import ray

from polar_proxy.rewards import CommandEvaluator, EvaluationInput, Score
from polar_proxy.rollouts.cluster.node import RayScorer
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.tasks import Environment, GitRepository, Task
from sandboxes.orphans import default_state_dir

PATCH = b"""diff --git a/done.txt b/done.txt
new file mode 100644
index 0000000..ce01362
--- /dev/null
+++ b/done.txt
@@ -0,0 +1 @@
+hello
"""
LABELS = {"polar.rollout": "roll_1"}


def work_for(shell: str, patch: bytes = PATCH) -> EvaluationInput:
    task = Task(
        "t-1", "t", 0, "Make done.txt.", files={"a": "b\n"}, evaluators=(CommandEvaluator(("sh", "-c", shell)),)
    )
    return EvaluationInput(task, patch, 0)


def registered() -> int:
    return sum(path.name.startswith("polar-") for path in default_state_dir().iterdir())


async def failure(scorer: RayScorer) -> str:
    """Return the error of a task whose repository does not exist."""
    whole = work_for("true")
    assert isinstance(whole.task, Task)
    environment = Environment(repository=GitRepository("/nowhere/at/all", "0" * 40))
    broken = replace(whole, task=replace(whole.task, environment=environment))
    try:
        await scorer(broken, "process", LABELS)
    except InfrastructureError as error:
        return f"{error.cause}: {error}"
    return "none"


async def main() -> dict[str, Any]:
    scorer = RayScorer({"polar_scoring": 1.0})
    solved, unsolved = await asyncio.gather(
        scorer(work_for("grep -q hello done.txt && echo seen"), "process", LABELS),
        scorer(work_for("grep -q hello done.txt", b""), "process", LABELS),
    )
    assert isinstance(solved, Score)
    slow = asyncio.create_task(scorer(work_for("sleep 1234.5"), "process", LABELS))
    while not registered():
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.0)
    began = time.monotonic()
    slow.cancel()
    await asyncio.wait([slow])
    return {
        "solved": solved.reward,
        "log": solved.log.decode(),
        "unsolved": unsolved.reward,
        "cancelled": slow.cancelled(),
        "seconds": time.monotonic() - began,
        "left": registered(),
        "failure": await failure(scorer),
    }


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    print(json.dumps(asyncio.run(main())))
