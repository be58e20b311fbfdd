"""The work of one node of a Ray cluster: a rollout service as on a single machine, and scoring for other nodes.

**Capacity.** A node offers sandboxes by the custom resource `polar_sandbox` (agents at a time), which `polar node`
sets. If any node has this resource, only nodes with this resource are used, because the others were left out on
purpose. If no node has this resource, every node is used for as many agents as its processors and its memory allow
(`agent_capacity`).

**Scoring tasks.** A scoring task gets a task and the agent's patch, and returns a score. The sandbox for scoring is
opened and closed on the node that Ray chose. The rollout stays with the node that ran its agent, and only this node
writes the rollout's records to the store.

Importing this module does not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polar_proxy import __version__
from polar_proxy.config import EngineSettings, Settings, is_loopback
from polar_proxy.engines.factory import make_engine, open_engines
from polar_proxy.gateway import Gateway
from polar_proxy.rewards import EvaluationInput, Score
from polar_proxy.rollouts.admission import ServiceLimits
from polar_proxy.rollouts.attempt import RemoteScorer
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.rollouts.recovery import recover
from polar_proxy.rollouts.scoring import score_work
from polar_proxy.rollouts.service import RolloutService
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.store import default_url, open_store
from polar_proxy.tasks import Task
from polar_proxy.telemetry import traced
from polar_proxy.terminal import configure_logging
from sandboxes import orphans
from sandboxes.base import SandboxKind, uncancellable

log = logging.getLogger(__name__)

SANDBOX_RESOURCE = "polar_sandbox"
"""Ray resource of a node: the number of agents that it runs at a time. The node's actor reserves all of it."""
SCORING_RESOURCE = "polar_scoring"
"""Ray resource of a node: the number of rollouts that it scores at a time, besides those that the node's own actor
scores."""

SANDBOX_BYTES = 4 << 30
"""Memory in bytes to count for one agent when a node's capacity is computed. The agent's task may need more or less."""


# ---------------------------------------------------------------- capacity


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node of the Ray cluster. `resources` has the node's amount of each resource, by the name that Ray gives
    it: CPU, memory (in bytes) and custom resources."""

    node_id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How many agents one node runs, and which resources it reserves for them."""

    node_id: str
    address: str
    agents: int
    reserved: Mapping[str, float]
    """The resources that the node's actor reserves, so that Ray uses them for nothing else."""


def agent_capacity(cpus: float, memory: float) -> int:
    """Return how many agents fit into this number of processors and bytes of memory.

    Two agents share a processor, because an agent mostly waits for the model. Each agent has its own memory."""
    return min(int(2 * cpus), int(memory // SANDBOX_BYTES))


def plan_nodes(nodes: Iterable[RayNode]) -> list[NodePlan]:
    """Return how to use each node that can run an agent, ordered by node id.

    If any node offers `SANDBOX_RESOURCE`, only nodes that offer it are used.
    """
    alive = sorted(nodes, key=lambda node: node.node_id)
    if any(SANDBOX_RESOURCE in node.resources for node in alive):
        return [
            NodePlan(node.node_id, node.address, agents, {SANDBOX_RESOURCE: agents})
            for node in alive
            if (agents := int(node.resources.get(SANDBOX_RESOURCE, 0))) > 0
        ]
    return [
        NodePlan(node.node_id, node.address, agents, {"memory": agents * SANDBOX_BYTES})
        for node in alive
        if (agents := agent_capacity(node.resources.get("CPU", 0), node.resources.get("memory", 0))) > 0
    ]


def scoring_resources(nodes: Iterable[RayNode]) -> dict[str, float]:
    """Return the Ray resources of a scoring task: one `SCORING_RESOURCE` if any node offers it, else one CPU."""
    return {SCORING_RESOURCE: 1.0} if any(SCORING_RESOURCE in node.resources for node in nodes) else {"CPU": 1.0}


# ---------------------------------------------------------------- a node


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of a node, sent by the head. It is passed between processes and never stored, because it may
    contain keys."""

    settings: Settings
    address: str
    """The node's own address, by which others reach it."""
    agents: int
    version: str = __version__

    @property
    def digest(self) -> str:
        """A hash of the configuration. If it is not the hash that the head expects, the head restarts the node."""
        settings = json.dumps(self.settings.model_dump(), sort_keys=True, default=_to_json_value)
        rest = f"{self.address} {self.agents} {self.version}"
        return hashlib.sha256(f"{settings} {rest}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeState:
    """The report of a node about itself."""

    worker: str
    """Name of the node's worker in the queue."""
    url: str
    """URL of the node's gateway."""
    digest: str


@contextlib.asynccontextmanager
async def run_node(config: NodeConfig, remote_scorer: RemoteScorer | None = None) -> AsyncIterator[NodeState]:
    """Clean up after dead processes of this machine, then run a gateway and a rollout service during the block.

    Yield the node's `NodeState`. When the block ends, rollouts in flight go back into the queue. Raises PolarError if
    the engine or the database cannot be used."""
    settings = node_settings(config.settings)
    async with open_store(
        settings.db or default_url(settings.home), create=False, artifacts=settings.home / "artifacts"
    ) as store:
        for line in await recover(store):
            log.info("%s", line)
        host, port = gateway_host(settings.gateway.host, config.address), settings.gateway.cluster_port
        gateway_settings = settings.gateway.model_copy(
            update={"host": host, "port": port, "require_known_keys": True, "shared": True}
        )
        async with (
            make_engine(settings.engine) as engine,
            open_engines(settings.engines) as engines,
            Gateway(engine, store, gateway_settings, engines=engines, routes=settings.routes) as gateway,
            traced(settings.telemetry, store, gateway.observe, gateway.sessions.rollout_of) as on_rollout_end,
        ):
            service = RolloutService.of(
                settings,
                store,
                gateway,
                engine,
                limits=node_limits(config, settings),
                note=lambda line: log.info("%s", line),
                remote_scorer=remote_scorer,
                on_rollout_end=on_rollout_end,
            )
            await service.test_sandbox(settings.run.sandbox)
            async with service:
                yield NodeState(service.worker.name, gateway.url, config.digest)


def node_settings(given: Settings) -> Settings:
    """Return the head's settings with this node's own folders and engine settings.

    An engine setting counts as the node's own if the node's environment or polar.toml changes it from its default."""
    own, default = Settings(), EngineSettings()
    changed = {name: value for name, value in own.engine if value != getattr(default, name)}
    engine = given.engine.model_copy(update=changed)
    return given.model_copy(update={"engine": engine, "home": own.home, "harnesses": own.harnesses})


def node_limits(config: NodeConfig, settings: Settings) -> ServiceLimits:
    """Return the limits of a node.

    A node claims a quarter more rollouts than may run at a time, so that a rollout is ready to start when another ends.
    A server without a cluster claims twice as many as may run. A node claims fewer, because another node may be free
    to run a rollout that would only wait here."""
    in_flight = config.agents + max(1, config.agents // 4)
    return ServiceLimits.of(settings, config.agents, in_flight=in_flight)


def gateway_host(host: str, address: str) -> str:
    """Return the address on which a node's gateway listens.

    The address is 127.0.0.1 if `host` (the setting `gateway.host`) is a loopback address, otherwise the node's own
    `address`."""
    return "127.0.0.1" if is_loopback(host) else address


def _to_json_value(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


# ---------------------------------------------------------------- what Ray runs


class NodeActor:
    """The Ray actor of a node: works from its creation until `stop`. Ray restarts it if its process dies."""

    def __init__(self, config: NodeConfig, scoring_resources: dict[str, float]) -> None:
        """`scoring_resources`: the Ray resources of a scoring task, from the function `scoring_resources`."""
        configure_logging(config.settings.log.level or "info", config.settings.log.format)
        self._config = config
        self._scorer = RayScorer(scoring_resources)
        self._stopping = asyncio.Event()
        self._state: asyncio.Future[NodeState] = asyncio.get_running_loop().create_future()
        self._work = asyncio.create_task(self._run())

    async def state(self) -> NodeState:
        """Wait until the node works, and return its report. Raises the error with which the node failed to start."""
        return await asyncio.shield(self._state)

    async def ended(self) -> None:
        """Wait until the node stops. Raises the error that ended it, unless `stop` was called."""
        await asyncio.shield(self._work)

    async def stop(self) -> None:
        """Put the rollouts in flight back into the queue and close everything."""
        self._stopping.set()
        await asyncio.wait([self._work])

    async def sweep(self) -> list[str]:
        """Remove the sandboxes of dead processes on this machine, for example those of a dead node that ran here
        too."""
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
    """The resources that must be free on a node (see `scoring_resources`)."""

    async def __call__(self, work: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score:
        import ray
        from ray.exceptions import RayError

        custom = {name: amount for name, amount in self.resources.items() if name != "CPU"}
        # The caller retries, not Ray, so that attempts are counted in one place.
        task: Any = ray.remote(max_retries=0)(_score).options(num_cpus=self.resources.get("CPU", 0), resources=custom)
        ref = task.remote(work, kind, dict(labels))
        try:
            result: Score | InfrastructureError = await await_ref(ref)
        except RayError as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise InfrastructureError("evaluator", f"the Ray task that scored the rollout failed: {line}") from error
        except asyncio.CancelledError:
            ray.cancel(ref)
            # The task closes its sandbox. If its node is gone, the next sweep of that machine removes the sandbox.
            await uncancellable(asyncio.wait([asyncio.wrap_future(ref.future())], timeout=10.0))
            raise
        if isinstance(result, InfrastructureError):
            raise result
        return result


async def await_ref(ref: Any) -> Any:
    """Return the result of a Ray task. Raises its error."""
    return await asyncio.wrap_future(ref.future())


def _score(work: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score | InfrastructureError:
    """Run a scoring task. If Ray interrupts the task to cancel it, `asyncio.run` still closes the sandbox."""
    task = work.task
    assert isinstance(task, Task)
    try:
        return asyncio.run(score_work(work, lambda: TaskSandboxes(kind).fresh(task, labels)))
    except InfrastructureError as error:
        return InfrastructureError(error.cause, error.text)
