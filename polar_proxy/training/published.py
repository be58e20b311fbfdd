"""A run's lines where others look for them: in the store, or at the server whose feed it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from polar_proxy import api_models as m
from polar_proxy.client import AsyncClient, ConflictError, NotFoundError, UnavailableError, UnreachableError
from polar_proxy.store import Store
from polar_proxy.types import Json


class MetricsSink(Protocol):
    """One run's. Both return whether the lines are kept; if not, the run begins again with all of them."""

    async def begin(self, lines: Sequence[Json]) -> bool:
        """These are all lines of the run: what else is known of it is forgotten."""
        ...

    async def add(self, first: int, lines: Sequence[Json]) -> bool:
        """Lines `first`, `first + 1`, ...; said twice is said once."""
        ...


class StoreSink:
    def __init__(self, store: Store, run_id: str, name: str, config: Json) -> None:
        self._store, self._run_id, self._name, self._config = store, run_id, name, config

    async def begin(self, lines: Sequence[Json]) -> bool:
        await self._store.training.put_run(self._run_id, self._name, self._config, lines)
        return True

    async def add(self, first: int, lines: Sequence[Json]) -> bool:
        await self._store.training.add_lines(self._run_id, first, lines)
        return True


class HttpSink:
    """A server that is away gets the lines when it is back; one that does not know of training runs never does."""

    def __init__(self, client: AsyncClient, run_id: str, name: str, config: Json, note: Callable[[str], None]) -> None:
        self._client, self._run_id, self._name, self._config, self._note = client, run_id, name, config, note
        self._too_old = False

    async def begin(self, lines: Sequence[Json]) -> bool:
        request = m.TrainingRunRequest(name=self._name, config=self._config, lines=_lines(lines))
        try:
            if not self._too_old:
                await self._client.put_training_run(self._run_id, request)
        except NotFoundError:
            self._too_old = True
            self._note("the server does not know of training runs: their curves are in the run's folder only")
        except (UnreachableError, UnavailableError):
            return False
        return True

    async def add(self, first: int, lines: Sequence[Json]) -> bool:
        request = m.TrainingLinesRequest(first=first, lines=_lines(lines))
        try:
            if not self._too_old:
                await self._client.add_training_lines(self._run_id, request)
        except (UnreachableError, UnavailableError, NotFoundError, ConflictError):  # away, or without what it had
            return False
        return True


def _lines(lines: Sequence[Json]) -> list[m.TrainingLine]:
    return [m.TrainingLine(**line) for line in lines]
