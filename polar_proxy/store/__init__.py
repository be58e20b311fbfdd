"""Everything that Polar keeps: sessions, calls with their exact tokens, rollouts, rewards and traces, in SQL.

One schema for SQLite (a file, the default) and PostgreSQL. `docs/guide/data.md` shows the tables to people.
"""

from polar_proxy.store.database import Durability
from polar_proxy.store.migrate import upgrade
from polar_proxy.store.rows import (
    FINAL_STATUSES,
    ROLLOUT_STATUSES,
    ArtifactRow,
    CallSummary,
    EventRow,
    RewardRow,
    RolloutRow,
    RolloutStatus,
    SessionOrigin,
    SessionRow,
    SessionSummary,
    StoredCall,
    TaskRow,
)
from polar_proxy.store.store import Store, open_store
from polar_proxy.store.urls import default_url, display_url, normalise_url

__all__ = [
    "FINAL_STATUSES",
    "ROLLOUT_STATUSES",
    "ArtifactRow",
    "CallSummary",
    "Durability",
    "EventRow",
    "RewardRow",
    "RolloutRow",
    "RolloutStatus",
    "SessionOrigin",
    "SessionRow",
    "SessionSummary",
    "Store",
    "StoredCall",
    "TaskRow",
    "default_url",
    "display_url",
    "normalise_url",
    "open_store",
    "upgrade",
]
