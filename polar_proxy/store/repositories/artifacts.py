"""Rewards of rollouts and sessions; also artifacts: files such as patches and logs, each named by its SHA-256."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Update, insert, select, update

from polar_proxy.atomic_file import replace_file
from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import schema
from polar_proxy.store.database import Database, Repository, row_columns
from polar_proxy.store.secrets import bytes_without_secrets, json_without_secrets, log_without_secrets, storable_text
from polar_proxy.types import Json, new_id

_w = schema.rewards.c
_a = schema.artifacts.c
_r = schema.rollouts.c
_s = schema.sessions.c
_t = schema.traces.c


@dataclass(frozen=True, slots=True)
class RewardRow:
    reward_id: str
    rollout_id: str | None
    session_id: str | None
    trace_id: str | None
    call_id: str | None
    source: str
    value: float | None
    detail: Json
    created_at: float


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    artifact_id: str
    rollout_id: str
    name: str
    sha256: str
    bytes: int
    created_at: float
    path: Path
    """The file on this machine that holds the artifact's content."""


class RewardRepository(Repository):
    """Rewards of rollouts, of sessions without a rollout, and of their traces and calls."""

    async def add(
        self,
        rollout_id: str | None,
        value: float | None,
        source: str,
        detail: Json,
        trace_id: str | None = None,
        call_id: str | None = None,
        *,
        session_id: str | None = None,
    ) -> str:
        """Store a reward of the rollout or session, of one of its traces or of one of its calls. Return its id.

        All rewards are kept. The row of a trace, rollout or session has its newest reward. A trace that was given no
        reward has the newest reward of its rollout or session.
        `value` None: the evaluator returned no value.
        """
        if (rollout_id is None) == (session_id is None):
            raise UsageError("Give either rollout_id or session_id.")
        row = RewardRow(
            new_id("rew"),
            rollout_id,
            session_id,
            trace_id,
            call_id,
            storable_text(source) or "",
            value,
            json_without_secrets(detail),
            time.time(),
        )

        def write(connection: Connection) -> None:
            connection.execute(insert(schema.rewards).values(asdict(row)))
            if trace_id is not None and call_id is None:
                connection.execute(update(schema.traces).where(_t.trace_id == trace_id).values(reward=value))
            elif call_id is None:
                for statement in _set_reward(rollout_id, session_id):
                    connection.execute(statement.values(reward=value))

        await self._database.write(write)
        return row.reward_id

    async def get(self, reward_id: str) -> RewardRow | None:
        return await self._row(RewardRow, _select_rewards.where(_w.reward_id == reward_id))

    async def of_rollout(self, rollout_id: str) -> list[RewardRow]:
        """Return the rewards of a rollout, including those of its traces and calls, oldest first."""
        return await self._rows(RewardRow, _select_rewards.where(_w.rollout_id == rollout_id).order_by(_w.reward_id))

    async def of_session(self, session_id: str) -> list[RewardRow]:
        """Return the rewards of a session without a rollout, including those of its traces and calls, oldest first."""
        return await self._rows(RewardRow, _select_rewards.where(_w.session_id == session_id).order_by(_w.reward_id))


_select_rewards = select(*row_columns(RewardRow, schema.rewards))


def _set_reward(rollout_id: str | None, session_id: str | None) -> tuple[Update, Update]:
    """Return two UPDATE statements: for the row of the rollout or session, and for its traces.

    Traces that were given a reward themselves are left out.
    """
    if rollout_id is not None:
        row, given = update(schema.rollouts).where(_r.rollout_id == rollout_id), _w.rollout_id == rollout_id
        mine = _t.rollout_id == rollout_id
    else:
        row, given = update(schema.sessions).where(_s.session_id == session_id), _w.session_id == session_id
        mine = _t.session_id == session_id
    own = select(_w.trace_id).where(given, _w.trace_id.is_not(None))
    return row, update(schema.traces).where(mine, _t.trace_id.not_in(own))


class ArtifactRepository(Repository):
    """Files of rollouts, such as patches and logs."""

    def __init__(self, database: Database, folder: Path) -> None:
        super().__init__(database)
        self._folder = folder

    async def add(self, rollout_id: str, name: str, data: bytes) -> ArtifactRow:
        """Store a file. Files with equal content are stored once.

        Secrets are removed from files named `*.log` and `*.json`. Other files stay as they are: a patch, for example,
        must apply.
        """
        if name.endswith(".log"):
            data = await asyncio.to_thread(log_without_secrets, data)
        elif name.endswith(".json"):
            data = await asyncio.to_thread(bytes_without_secrets, data)
        sha256 = await asyncio.to_thread(write_artifact, self._folder, data)
        values: dict[str, Any] = {
            "artifact_id": new_id("art"),
            "rollout_id": rollout_id,
            "name": name,
            "sha256": sha256,
            "bytes": len(data),
            "created_at": time.time(),
        }
        await self._write(insert(schema.artifacts).values(values))
        return ArtifactRow(**values, path=artifact_path(self._folder, sha256))

    async def get(self, artifact_id: str) -> ArtifactRow | None:
        found = await self._find(_a.artifact_id == artifact_id)
        return found[0] if found else None

    async def of_rollout(self, rollout_id: str) -> list[ArtifactRow]:
        """Return the artifacts of a rollout, oldest first."""
        return await self._find(_a.rollout_id == rollout_id)

    async def _find(self, which: ColumnElement[bool]) -> list[ArtifactRow]:
        query = select(schema.artifacts).where(which).order_by(_a.artifact_id)

        def read(connection: Connection) -> list[ArtifactRow]:
            rows = connection.execute(query)
            return [ArtifactRow(**row._mapping, path=artifact_path(self._folder, row.sha256)) for row in rows]

        return await self._database.read(read)


def artifact_path(folder: Path, sha256: str) -> Path:
    """Return the path of the artifact with this hash."""
    return folder / sha256[:2] / sha256


def write_artifact(folder: Path, data: bytes) -> str:
    """Store the data in a file named by its SHA-256, and return the hash. An existing file is kept."""
    sha256 = hashlib.sha256(data).hexdigest()
    path = artifact_path(folder, sha256)
    try:
        if path.exists():
            os.utime(path)  # makes the file young: `polar db prune` does not remove young files
            return sha256
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, data)
    except OSError as error:
        raise StoreError(f"An artifact cannot be written below {folder}: {error.strerror}") from error
    return sha256
