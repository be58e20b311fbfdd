"""The work of one node: store, engine, gateway and rollout service, as on a single machine. Independent of Ray."""

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
from polar_proxy.store import default_url, open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of a node, sent by the head. It is passed between processes and stored nowhere, because it may
    contain keys."""

    settings: Settings
    address: str
    """The node's own address, by which others reach it."""
    agents: int
    version: str = __version__
    lease_seconds: float = 30.0

    @property
    def digest(self) -> str:
        """A hash of the configuration; a node whose hash differs must be restarted."""
        settings = json.dumps(self.settings.model_dump(), sort_keys=True, default=_to_json_value)
        rest = f"{self.address} {self.agents} {self.version} {self.lease_seconds}"
        return hashlib.sha256(f"{settings} {rest}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeState:
    """The report of a node about itself."""

    address: str
    agents: int
    worker: str
    """The name of its worker in the queue."""
    url: str
    """The URL of its gateway."""
    digest: str
    engine: str


@contextlib.asynccontextmanager
async def run_node(config: NodeConfig, remote_scorer: RemoteScorer | None = None) -> AsyncIterator[NodeState]:
    """Clean up after dead processes of this machine, then work until the block ends; yield the node's report.

    Rollouts in flight then go back into the queue. Raises PolarError if the engine or the database cannot be used."""
    settings = node_settings(config.settings)
    async with open_store(
        settings.db or default_url(settings.home), create=False, artifacts=settings.home / "artifacts"
    ) as store:
        for line in await recover(store):
            log.info("%s", line)
        gateways = settings.gateway.model_copy(
            update={"host": gateway_host(settings.gateway.host, config.address), "port": settings.gateway.cluster_port}
            | {"require_known_keys": True, "shared": True}
        )
        async with make_engine(settings.engine) as engine, Gateway(engine, store, gateways) as gateway:
            service = RolloutService(
                store,
                gateway,
                engine,
                settings.harness_cache,
                limits=node_limits(config, settings),
                note=lambda line: log.info("%s", line),
                remote_scorer=remote_scorer,
            )
            async with service:
                yield NodeState(
                    address=config.address,
                    agents=config.agents,
                    worker=service.worker.name,
                    url=gateway.url,
                    digest=config.digest,
                    engine=f"{engine.info.engine} {engine.info.version}",
                )


def node_settings(given: Settings) -> Settings:
    """Return the head's settings with this node's own folders and engine settings, since each node may have an engine.

    The node's engine settings come from its environment and polar.toml."""
    own, plain = Settings(), EngineSettings()
    engine = {name: value for name, value in own.engine if value != getattr(plain, name)}
    changes: dict[str, Any] = {"engine": given.engine.model_copy(update=engine)}
    return given.model_copy(update={**changes, "home": own.home, "harnesses": own.harnesses})


def node_limits(config: NodeConfig, settings: Settings) -> ServiceLimits:
    """Return the limits of a node, which claims a quarter more rollouts than may run, so that a free place is filled at
    once.

    A single machine claims twice as many as may run. Here another node could run what this one only claims."""
    limits = ServiceLimits.of(settings, agents=config.agents)
    in_flight = config.agents + max(1, config.agents // 4)
    return replace(limits, worker=replace(limits.worker, in_flight=in_flight, lease_seconds=config.lease_seconds))


def gateway_host(host: str, address: str) -> str:
    """Return the address to bind the node's gateway to: `address` if `host` is open to other machines, else
    loopback."""
    return address if host in ("0.0.0.0", "::") else "127.0.0.1"


def _to_json_value(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
