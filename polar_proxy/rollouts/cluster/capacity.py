"""The work of each node of a Ray cluster, computed from the resources that Ray reports. Pure.

A node offers sandboxes by the custom resource `polar_sandbox` (agents at a time), which `polar node` sets. If any node
has it, only such nodes are used, because the others were left out on purpose. In a cluster without it, every node with
a processor and the memory for one sandbox is used, up to its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SANDBOX_RESOURCE = "polar_sandbox"
"""Agents at a time. The actor of a node reserves all of it."""
SCORING_RESOURCE = "polar_scoring"
"""Rollouts scored at a time, besides those that the node's own actor scores."""

SANDBOX_BYTES = 4 << 30
"""Memory of a sandbox whose task does not say what it needs."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node with its resources by Ray's names: CPU, memory in bytes, custom ones."""

    node_id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The work of one node."""

    node_id: str
    address: str
    agents: int
    reserved: Mapping[str, float]
    """The resources that its actor reserves, so that Ray uses them for nothing else."""


def agent_capacity(cpus: float, memory: float) -> int:
    """Return how many agents fit into this number of processors and bytes of memory.

    Two agents share a processor, because an agent mostly waits for the model; each has its own memory."""
    return min(int(2 * cpus), int(memory // SANDBOX_BYTES))


def plan_nodes(nodes: Iterable[RayNode]) -> list[NodePlan]:
    """Return the nodes to use, by node id."""
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
    """Return the resources of a scoring task: a scoring place if nodes offer any, else a processor."""
    return {SCORING_RESOURCE: 1.0} if any(SCORING_RESOURCE in node.resources for node in nodes) else {"CPU": 1.0}
