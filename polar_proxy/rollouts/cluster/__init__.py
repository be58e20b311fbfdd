"""Rollouts on many machines: workers as actors on an existing Ray cluster, with PostgreSQL as the store.

    polar serve --executor ray     the head: API, a gateway, and `Cluster`, which keeps one actor on each node
      node actor                   `run_node`: gateway, engine client and RolloutService, as on one machine
      scoring task                 scores a rollout where Ray has capacity, if its own node would make it wait

The queue, the claims and the reclaiming from dead workers are in the database, exactly as for several processes on one
machine. Ray lists the nodes, starts and restarts the actors and places the scoring tasks. This package has no
scheduler, election or queue.

Importing this package does not import Ray.
"""

from polar_proxy.rollouts.cluster.head import Cluster
from polar_proxy.rollouts.cluster.node import SANDBOX_RESOURCE, SCORING_RESOURCE, agent_capacity

__all__ = ["SANDBOX_RESOURCE", "SCORING_RESOURCE", "Cluster", "agent_capacity"]
