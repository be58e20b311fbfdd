"""How much work a node takes, and the settings that it gets; without Ray."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.rollouts.cluster import Cluster
from polar_proxy.rollouts.cluster.node import (
    NodeConfig,
    NodePlan,
    RayNode,
    agent_capacity,
    gateway_host,
    node_limits,
    node_settings,
    plan_nodes,
    scoring_resources,
)
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.store import open_store

GIB = 1 << 30


def node(name: str, **resources: float) -> RayNode:
    return RayNode(name, f"10.0.0.{ord(name) - 96}", resources)


def test_uses_only_nodes_that_offer_sandboxes_if_any_do() -> None:
    nodes = [node("b", CPU=64, memory=512 * GIB), node("a", CPU=4, polar_sandbox=3), node("c", polar_sandbox=8)]
    assert plan_nodes(nodes) == [
        NodePlan("a", "10.0.0.1", 3, {"polar_sandbox": 3}),
        NodePlan("c", "10.0.0.3", 8, {"polar_sandbox": 8}),
    ]


def test_memory_decides_if_no_node_offers_sandboxes() -> None:
    nodes = [node("a", CPU=64, memory=33 * GIB), node("b", CPU=1, memory=512 * GIB), node("c", GPU=8, memory=GIB)]
    assert plan_nodes(nodes) == [
        NodePlan("a", "10.0.0.1", 8, {"memory": 32 * GIB}),
        NodePlan("b", "10.0.0.2", 2, {"memory": 8 * GIB}),
    ]
    assert plan_nodes([]) == []


@pytest.mark.parametrize(
    ("cpus", "memory", "agents"), [(4, 64 * GIB, 8), (64, 64 * GIB, 16), (0, 64 * GIB, 0), (8, 3 * GIB, 0)]
)
def test_agent_capacity(cpus: float, memory: float, agents: int) -> None:
    assert agent_capacity(cpus, memory) == agents


def test_scoring_needs_an_offered_place_or_a_processor() -> None:
    assert scoring_resources([node("a", CPU=4), node("b", polar_scoring=2)]) == {"polar_scoring": 1.0}
    assert scoring_resources([node("a", CPU=4)]) == {"CPU": 1.0}


def test_a_node_keeps_its_own_engine_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLAR_HOME", "/on/the/head")
    given = Settings(engine={"kind": "vllm", "url": "http://head:8000", "model": "m"}, run={"concurrency": 7})
    received = pickle.loads(pickle.dumps(given))
    monkeypatch.setenv("POLAR_HOME", "/on/the/node")
    monkeypatch.setenv("POLAR_ENGINE__URL", "http://node:8000")
    monkeypatch.setenv("POLAR_RUN__CONCURRENCY", "99")
    found = node_settings(received)
    assert (found.engine.kind, found.engine.url, found.engine.model) == ("vllm", "http://node:8000", "m")
    assert found.home == Path("/on/the/node")
    assert found.run.concurrency == 7, "the head decides how much runs"
    monkeypatch.delenv("POLAR_ENGINE__URL")
    monkeypatch.setenv("POLAR_HOME", "/on/the/head")
    assert node_settings(received).model_dump() == given.model_dump()


def test_equal_configurations_have_equal_digests() -> None:
    """Also in another process, although sets have no order."""
    off = frozenset({"a", "b", "c", "d"})
    one, two = (
        NodeConfig(Settings(gateway={"normalisers_off": names}), "10.0.0.1", 2) for names in (off, sorted(off)[::-1])
    )
    assert one.digest == two.digest
    assert one.digest != dataclasses.replace(one, agents=3).digest
    assert one.digest != dataclasses.replace(one, settings=Settings(engine={"api_key": "other"})).digest


@pytest.mark.parametrize(("agents", "in_flight"), [(1, 2), (2, 3), (8, 10), (40, 50)])
def test_a_node_claims_little_that_another_could_run(agents: int, in_flight: int) -> None:
    limits = node_limits(NodeConfig(Settings(), "10.0.0.1", agents), Settings())
    assert (limits.in_flight, limits.running) == (in_flight, agents)


def test_infrastructure_errors_can_be_sent_between_machines() -> None:
    received = pickle.loads(pickle.dumps(InfrastructureError("disk", "No space is left.")))
    assert (received.cause, str(received)) == ("disk", "No space is left.")


def test_gateways_listen_where_the_heads_does() -> None:
    assert gateway_host("127.0.0.1", "10.0.0.1") == "127.0.0.1"
    for reachable in ("0.0.0.0", "::", "10.0.0.5"):
        assert gateway_host(reachable, "10.0.0.1") == "10.0.0.1"


async def test_a_cluster_refuses_a_database_file(tmp_path: Path) -> None:
    async with open_store(f"{tmp_path}/polar.db") as store:
        with pytest.raises(UsageError, match="postgresql://"):
            Cluster(Settings(), store, "auto")
