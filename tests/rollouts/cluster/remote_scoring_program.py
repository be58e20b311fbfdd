"""A driver of the cluster that has attempts scored there; prints what came of it as JSON. Run by test_cluster.py."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from typing import Any

import ray

from polar_proxy.rewards import CommandEvaluator, EvaluationInput, Score
from polar_proxy.rollouts.cluster.scoring import RayScorer
from polar_proxy.rollouts.worker import InfrastructureError
from polar_proxy.tasks import Environment, Repository, Task
from sandboxes import default_state_dir

PATCH = b"""diff --git a/done.txt b/done.txt
new file mode 100644
index 0000000..ce01362
--- /dev/null
+++ b/done.txt
@@ -0,0 +1 @@
+hello
"""
LABELS = {"polar.rollout": "roll_1"}


def attempt(shell: str, patch: bytes = PATCH) -> EvaluationInput:
    task = Task(
        "t-1", "t", 0, "Make done.txt.", files={"a": "b\n"}, evaluators=(CommandEvaluator(("sh", "-c", shell)),)
    )
    return EvaluationInput(task, patch, 0)


def registered() -> int:
    return sum(path.name.startswith("polar-") for path in default_state_dir().iterdir())


async def failure(scoring: RayScorer) -> str:
    """What is wrong over there arrives as what it is."""
    whole = attempt("true")
    environment = Environment(repository=Repository("/nowhere/at/all", "0" * 40))
    broken = replace(whole, task=replace(whole.task, environment=environment))
    try:
        await scoring(broken, "process", LABELS)
    except InfrastructureError as error:
        return f"{error.cause}: {error}"
    return "none"


async def main() -> dict[str, Any]:
    scoring = RayScorer({"polar_scoring": 1.0})
    solved, unsolved = await asyncio.gather(
        scoring(attempt("grep -q hello done.txt && echo seen"), "process", LABELS),
        scoring(attempt("grep -q hello done.txt", b""), "process", LABELS),
    )
    assert isinstance(solved, Score)
    slow = asyncio.create_task(scoring(attempt("sleep 1234.5"), "process", LABELS))
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
        "done": scoring.done,
        "cancelled": slow.cancelled(),
        "seconds": time.monotonic() - began,
        "left": registered(),
        "failure": await failure(scoring),
    }


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    print(json.dumps(asyncio.run(main())))
