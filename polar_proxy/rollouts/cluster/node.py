"""What works on one node: store, engine, gateway and rollout service, as one machine has them. Knows nothing of Ray."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from polar_proxy import __version__
from polar_proxy.config import EngineSettings, Settings
from polar_proxy.engines.factory import make_engine
from polar_proxy.gateway import Gateway
from polar_proxy.rollouts.attempt import RemoteScorer
from polar_proxy.rollouts.recovery import recover
from polar_proxy.rollouts.service import RolloutService, ServiceLimits
from polar_proxy.store import Store, default_url, open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What the head tells a node. Goes from process to process and is written nowhere: it may hold keys."""

    settings: Settings
    address: str
    """The node's own, by which others reach it."""
    agents: int
    version: str = __version__
    lease_seconds: float = 30.0

    @property
    def digest(self) -> str:
        """Equal for equal configurations: a node that was started with another one has to be started anew."""
        told = json.dumps(self.settings.model_dump(), sort_keys=True, default=_plain)
        rest = f"{self.address} {self.agents} {self.version} {self.lease_seconds}"
        return hashlib.sha256(f"{told} {rest}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeState:
    """What a node says of itself."""

    address: str
    agents: int
    worker: str
    """Its name in the queue."""
    url: str
    """Of its gateway."""
    digest: str
    engine: str


@dataclass(frozen=True, slots=True)
class RunningNode:
    config: NodeConfig
    store: Store
    gateway: Gateway
    service: RolloutService
    engine: str

    def state(self) -> NodeState:
        worker = self.service.scheduler.worker
        given = self.config
        return NodeState(given.address, given.agents, worker, self.gateway.url, given.digest, self.engine)


@contextlib.asynccontextmanager
async def run_node(config: NodeConfig, elsewhere: RemoteScorer | None = None) -> AsyncIterator[RunningNode]:
    """Clean up after whoever worked here before, then work until the block ends; what is in hand then goes back into
    the queue. Raises PolarError where the engine or the database cannot be had."""
    settings = node_settings(config.settings)
    async with open_store(
        settings.db or default_url(settings.home), create=False, artifacts=settings.home / "artifacts"
    ) as store:
        for line in await recover(store):
            log.info("%s", line)
        gateways = settings.gateway.model_copy(
            update={"host": _bound(settings.gateway.host, config.address), "port": settings.gateway.cluster_port}
            | {"require_known_keys": True, "shared": True}
        )
        async with make_engine(settings.engine) as engine, Gateway(engine, store, gateways) as gateway:
            service = RolloutService(
                store,
                gateway,
                engine,
                settings.harness_cache,
                limits=_limits(config, settings),
                note=lambda line: log.info("%s", line),
                elsewhere=elsewhere,
            )
            async with service:
                yield RunningNode(config, store, gateway, service, f"{engine.info.engine} {engine.info.version}")


def node_settings(given: Settings) -> Settings:
    """The head's settings with this node's own folders, and with what its environment and polar.toml say of the engine:
    each node may have one of its own."""
    own, plain = Settings(), EngineSettings()
    engine = {name: value for name, value in own.engine if value != getattr(plain, name)}
    changes: dict[str, Any] = {"engine": given.engine.model_copy(update=engine)}
    return given.model_copy(update={**changes, "home": own.home, "harnesses": own.harnesses})


def _limits(config: NodeConfig, settings: Settings) -> ServiceLimits:
    """A quarter more is taken in hand than may run, so that a place that falls free is filled at once; not twice as
    much, as on one machine: what one node holds and cannot run, another could."""
    limits = ServiceLimits.of(config.agents, settings.admission, prebuild=settings.run.prebuild)
    in_flight = config.agents + max(1, config.agents // 4)
    return replace(limits, scheduler=replace(limits.scheduler, in_flight=in_flight, lease_seconds=config.lease_seconds))


def _bound(host: str, address: str) -> str:
    """A gateway that may be reached from elsewhere is bound to the node's own address; one on loopback stays there."""
    return address if host in ("0.0.0.0", "::") else "127.0.0.1"


def _plain(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
