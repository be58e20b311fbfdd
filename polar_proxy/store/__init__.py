"""Everything that Polar records: sessions, calls with their exact tokens, rollouts, rewards and traces, in SQL.

One schema for SQLite (a file, the default) and PostgreSQL. `docs/guide/data.md` describes the tables.
"""

from polar_proxy.store.migrate import upgrade
from polar_proxy.store.repositories.artifacts import ArtifactRow, RewardRow
from polar_proxy.store.repositories.rollouts import EventRow, RolloutRow, TaskRow
from polar_proxy.store.repositories.sessions import SessionOrigin, SessionRow, SessionSummary
from polar_proxy.store.schema import FINAL_STATUSES, ROLLOUT_STATUSES, RolloutStatus
from polar_proxy.store.store import Store, open_store
from polar_proxy.store.urls import default_url, display_url, normalise_url

__all__ = [
    "FINAL_STATUSES",
    "ROLLOUT_STATUSES",
    "ArtifactRow",
    "EventRow",
    "RewardRow",
    "RolloutRow",
    "RolloutStatus",
    "SessionOrigin",
    "SessionRow",
    "SessionSummary",
    "Store",
    "TaskRow",
    "default_url",
    "display_url",
    "normalise_url",
    "open_store",
    "upgrade",
]
