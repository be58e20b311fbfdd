"""Many machines: rollout workers as actors on an existing Ray cluster, with PostgreSQL as the store.

    polar serve --executor ray     the head: API, a gateway, and `Cluster`, which keeps one actor on each node
      node actor                   `working`: a gateway, the engine's client and a RolloutService, as on one machine
      scoring task                 what finds no place to be scored on its own node goes where Ray has room

Who does what: the queue, who holds which rollout and what is taken from the dead are in the database, exactly as for
several processes on one machine; Ray says which nodes there are, starts, restarts and places. Nothing here schedules,
elects or queues.

Importing this package does not import Ray.
"""

from polar_proxy.rollouts.cluster.capacity import SANDBOX_RESOURCE, SCORING_RESOURCE, agent_capacity
from polar_proxy.rollouts.cluster.head import Cluster

__all__ = ["SANDBOX_RESOURCE", "SCORING_RESOURCE", "Cluster", "agent_capacity"]
