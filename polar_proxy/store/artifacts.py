"""What a rollout leaves beside its calls: rewards, events and artifacts."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from pathlib import Path

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.base import Repository
from polar_proxy.store.database import Database
from polar_proxy.store.rows import ArtifactRow, RewardRow
from polar_proxy.store.secrets import json_without_secrets, log_without_secrets
from polar_proxy.types import Json, new_id


class RewardRepository(Repository):
    async def add(
        self,
        rollout_id: str,
        value: float | None,
        source: str,
        detail: Json,
        trace_id: str | None = None,
        call_id: str | None = None,
    ) -> str:
        """A reward of the rollout, of one of its traces or of one call. Returns its id.

        All rewards are kept; the newest of the rollout (or trace) also stands in its row. `value` None: the evaluator
        could not say.
        """
        reward_id = new_id("rew")
        statement = insert(schema.rewards).values(
            reward_id=reward_id,
            rollout_id=rollout_id,
            trace_id=trace_id,
            call_id=call_id,
            source=source,
            value=value,
            detail=detail,
            created_at=time.time(),
        )
        async with self._database.writing() as connection:
            await connection.execute(statement)
            if trace_id is not None and call_id is None:
                await connection.execute(
                    update(schema.traces).where(schema.traces.c.trace_id == trace_id).values(reward=value)
                )
            elif call_id is None:
                await connection.execute(
                    update(schema.rollouts).where(schema.rollouts.c.rollout_id == rollout_id).values(reward=value)
                )
        return reward_id

    async def of_rollout(self, rollout_id: str) -> list[RewardRow]:
        """All rewards of a rollout, its traces and calls, oldest first."""
        c = schema.rewards.c
        columns = (c.reward_id, c.rollout_id, c.trace_id, c.call_id, c.source, c.value, c.detail, c.created_at)
        query = select(*columns).where(c.rollout_id == rollout_id).order_by(c.reward_id)
        async with self._database.reading() as connection:
            return [RewardRow(*row) for row in await connection.execute(query)]


class ArtifactRepository(Repository):
    def __init__(self, database: Database, folder: Path) -> None:
        super().__init__(database)
        self._artifacts = folder

    async def add(self, rollout_id: str, name: str, data: bytes) -> ArtifactRow:
        """Keep a file (a patch, a log). Equal contents are one file on disk, named by their SHA-256.

        Logs are kept without secrets; a patch is kept as it is, since it must still apply."""
        if name.endswith(".log"):
            data = await asyncio.to_thread(log_without_secrets, data)
        sha256 = await asyncio.to_thread(write_artifact, self._artifacts, data)
        values = {
            "artifact_id": new_id("art"),
            "rollout_id": rollout_id,
            "name": name,
            "sha256": sha256,
            "bytes": len(data),
            "created_at": time.time(),
        }
        async with self._database.writing() as connection:
            await connection.execute(insert(schema.artifacts).values(values))
        return ArtifactRow(**values, path=artifact_path(self._artifacts, sha256))  # type: ignore[arg-type]

    async def of_rollout(self, rollout_id: str) -> list[ArtifactRow]:
        c = schema.artifacts.c
        columns = (c.artifact_id, c.rollout_id, c.name, c.sha256, c.bytes, c.created_at)
        query = select(*columns).where(c.rollout_id == rollout_id).order_by(c.artifact_id)
        async with self._database.reading() as connection:
            rows = (await connection.execute(query)).all()
        return [ArtifactRow(*row, path=artifact_path(self._artifacts, row.sha256)) for row in rows]


async def insert_event(connection: AsyncConnection, rollout_id: str, at: float, kind: str, data: Json) -> None:
    await connection.execute(
        insert(schema.events).values(rollout_id=rollout_id, at=at, kind=kind, data=json_without_secrets(data))
    )


def artifact_path(folder: Path, sha256: str) -> Path:
    """Where the artifact with this hash lies."""
    return folder / sha256[:2] / sha256


def write_artifact(folder: Path, data: bytes) -> str:
    """Write it under its SHA-256, which is returned, unless it is there."""
    sha256 = hashlib.sha256(data).hexdigest()
    place = artifact_path(folder, sha256)
    try:
        os.utime(place)  # `polar db prune` leaves young files alone
        return sha256
    except FileNotFoundError:
        pass
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Written aside and renamed: a file under its hash is whole, whatever happens in between.
        handle, temporary = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(place)
    except OSError as error:
        raise StoreError(f"An artifact cannot be written below {folder}: {error.strerror}") from error
    return sha256
