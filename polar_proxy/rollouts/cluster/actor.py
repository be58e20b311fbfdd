"""The code that Ray runs on the nodes: the actor of each node, and scoring tasks. Importing this module imports Ray.

A scoring task gets the agent's patch and its task, and returns a score; its sandbox is opened and closed on the node
that Ray chose. The rollout stays with the node that ran it, and only that node writes to the store about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from polar_proxy.rewards import EvaluationInput, Score
from polar_proxy.rollouts.attempt import score_work
from polar_proxy.rollouts.cluster.node import NodeConfig, NodeState, run_node
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.rollouts.workspace import TaskSandboxes
from polar_proxy.tasks import Task
from sandboxes import orphans
from sandboxes.base import SandboxKind, uncancellable

log = logging.getLogger(__name__)


class NodeActor:
    """Works from its creation until `stop`. Ray restarts it if its process dies."""

    def __init__(self, config: NodeConfig, scoring_resources: dict[str, float]) -> None:
        """`scoring_resources` is as for `RayScorer`."""
        logging.basicConfig(level=logging.INFO)
        self._config = config
        self._scorer = RayScorer(scoring_resources)
        self._stopping = asyncio.Event()
        self._state: asyncio.Future[NodeState] = asyncio.get_running_loop().create_future()
        self._work = asyncio.create_task(self._run())

    async def state(self) -> NodeState:
        """Wait until the node works. Raises the error that prevents it."""
        return await asyncio.shield(self._state)

    async def ended(self) -> None:
        """Wait until the node was stopped. Raises the error that ended it otherwise."""
        await asyncio.shield(self._work)

    async def stop(self) -> None:
        """Put the rollouts in flight back into the queue and close everything."""
        self._stopping.set()
        await asyncio.wait([self._work])

    async def sweep(self) -> list[str]:
        """Remove the sandboxes of dead processes of this machine; another node may run on the same machine."""
        return [str(item) for item in await orphans.sweep()]

    async def _run(self) -> None:
        try:
            async with run_node(self._config, self._scorer) as state:
                self._state.set_result(state)
                await self._stopping.wait()
        except BaseException as error:
            if not self._state.done():
                self._state.set_exception(error)
            raise


@dataclass(slots=True)
class RayScorer:
    """A `RemoteScorer` that scores in Ray tasks."""

    resources: Mapping[str, float]
    """The resources that must be free on a node (`capacity.scoring_resources`)."""
    done: int = field(default=0, init=False)

    async def __call__(self, work: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score:
        custom = {name: amount for name, amount in self.resources.items() if name != "CPU"}
        # The caller retries, not Ray, so that attempts are counted in one place.
        task: Any = ray.remote(max_retries=0)(_score).options(num_cpus=self.resources.get("CPU", 0), resources=custom)
        ref = task.remote(work, kind, dict(labels))
        try:
            result = await asyncio.wrap_future(ref.future())
        except RayError as error:
            raise InfrastructureError("evaluator", f"its scoring task was lost: {_first_line(error)}") from error
        except asyncio.CancelledError:
            ray.cancel(ref)
            await uncancellable(_wait_for_end(ref))
            raise
        self.done += 1
        if isinstance(result, ScoringFailure):
            raise InfrastructureError(result.cause, result.text)
        assert isinstance(result, Score)
        return result


@dataclass(frozen=True, slots=True)
class ScoringFailure:
    """An InfrastructureError in a form that Ray can return."""

    cause: str
    text: str


def _score(work: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score | ScoringFailure:
    """Run a scoring task. When Ray cancels it by an interrupt, `asyncio.run` still closes its sandbox."""
    task = work.task
    assert isinstance(task, Task)

    async def score() -> Score:
        return await score_work(work, lambda: TaskSandboxes(kind).fresh(task, labels))

    try:
        return asyncio.run(score())
    except InfrastructureError as error:
        return ScoringFailure(error.cause, str(error))


async def _wait_for_end(ref: Any) -> None:
    """Wait until a cancelled task has closed its sandbox; if its node is gone, the next sweep of that machine removes
    the sandbox."""
    await asyncio.wait([asyncio.wrap_future(ref.future())], timeout=10.0)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
