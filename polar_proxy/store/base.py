"""What every part of the store shares."""

from __future__ import annotations

from pathlib import Path

from polar_proxy.store.announce import CallAnnouncer
from polar_proxy.store.database import Database
from polar_proxy.store.group_commit import GroupCommit


class Repository:
    """One family of the store's methods; `store.Store` is all of them together."""

    _database: Database
    _commits: GroupCommit
    _announcer: CallAnnouncer
    _artifacts: Path
