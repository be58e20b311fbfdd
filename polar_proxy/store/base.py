"""What every part of the store shares."""

from __future__ import annotations

from pathlib import Path

from polar_proxy.store.announce import Announcer
from polar_proxy.store.commit import GroupCommit
from polar_proxy.store.database import Database


class Part:
    """One family of the store's methods; `store.Store` is all of them together."""

    _database: Database
    _commits: GroupCommit
    _announcer: Announcer
    _artifacts: Path
