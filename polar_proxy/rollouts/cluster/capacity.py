"""How much work a node of a Ray cluster takes, read from what Ray says it has. Pure.

A node offers places by the custom resource `polar_sandbox` (agents at a time; `polar node` sets it). Where any node
does, only such nodes are worked on: the others were left out on purpose. In a cluster where none does every node with
a processor and memory for one sandbox is worked on, as far as its memory goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SANDBOX_RESOURCE = "polar_sandbox"
"""Agents at a time: reserved as a whole by the actor that works on the node."""
SCORING_RESOURCE = "polar_scoring"
"""Rollouts scored at a time beside those that the node's own actor scores."""

SANDBOX_BYTES = 4 << 30
"""Memory of a sandbox whose task does not say."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node. `resources`: Ray's names and totals (CPU, memory in bytes, custom ones)."""

    node_id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node to work on."""

    node_id: str
    address: str
    agents: int
    reserved: Mapping[str, float]
    """What its actor takes of the node, so that Ray gives it to nobody else."""


def agent_capacity(cpus: float, memory: float) -> int:
    """Agents at a time for so many processors and bytes. An agent waits for the model most of the time, so that two
    share a processor; its memory it has for itself."""
    return min(int(2 * cpus), int(memory // SANDBOX_BYTES))


def plan_nodes(nodes: Iterable[RayNode]) -> list[NodePlan]:
    """The nodes to work on, by node id."""
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
    """What Ray must find free on a node to place a scoring there: tests need a processor, on a node that offers it."""
    return {SCORING_RESOURCE: 1.0} if any(SCORING_RESOURCE in node.resources for node in nodes) else {"CPU": 1.0}
