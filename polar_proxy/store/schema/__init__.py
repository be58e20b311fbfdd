"""The tables of the newest schema revision. `migrations/` creates them; a test compares the two.

Times are seconds since the epoch (double precision). Ids are text that sorts by time of creation. Hashes have 16 bytes
(hashes of keys: 32). JSON columns hold JSON text, which the JSON functions of SQLite and PostgreSQL read. Binary cells
are packed as `cells` describes.
"""

from polar_proxy.store.schema.base import VERSION_TABLE, PackedJson, metadata
from polar_proxy.store.schema.call_tables import (
    calls,
    completions,
    conversation_items,
    conversations,
    engines,
    nodes,
    open_calls,
    provider_ids,
    rescores,
    sessions,
    settings,
)
from polar_proxy.store.schema.key_tables import api_keys
from polar_proxy.store.schema.rollout_tables import (
    FINAL_STATUSES,
    OPEN_LEASE,
    ROLLOUT_STATUSES,
    RolloutStatus,
    artifacts,
    callbacks,
    fleet,
    groups,
    job_events,
    jobs,
    leases,
    open_leases,
    remarks,
    rewards,
    rollout_events,
    rollout_is_final,
    rollouts,
    stages,
    tasks,
)
from polar_proxy.store.schema.trace_tables import exclusions, trace_spans, traces, training_lines, training_runs

__all__ = [
    "FINAL_STATUSES",
    "OPEN_LEASE",
    "ROLLOUT_STATUSES",
    "VERSION_TABLE",
    "PackedJson",
    "RolloutStatus",
    "api_keys",
    "artifacts",
    "callbacks",
    "calls",
    "completions",
    "conversation_items",
    "conversations",
    "engines",
    "exclusions",
    "fleet",
    "groups",
    "job_events",
    "jobs",
    "leases",
    "metadata",
    "nodes",
    "open_calls",
    "open_leases",
    "provider_ids",
    "remarks",
    "rescores",
    "rewards",
    "rollout_events",
    "rollout_is_final",
    "rollouts",
    "sessions",
    "settings",
    "stages",
    "tasks",
    "trace_spans",
    "traces",
    "training_lines",
    "training_runs",
]
