"""What passes between a call's task on the event loop and the worker thread that owns the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from polar_proxy.engines.local.kv_cache import BatchKV, KVShape, SequenceKV
from polar_proxy.engines.local.sampling import SequenceSampler
from polar_proxy.engines.local.tokenizer import TextStream
from polar_proxy.errors import EngineError
from polar_proxy.types import TokenIds


class PrefillStarted(NamedTuple):
    """Prefill of the first choice begins; so many of the prompt's tokens came from the cache."""

    cached_tokens: int


class SampledToken(NamedTuple):
    """One sampled token of one choice. `text` may lag behind; `finish` is stop or length with the last one."""

    choice: int
    token_id: int
    logprob: float
    text: str
    top: list[tuple[int, float]]
    finish: str | None
    stop: str | None = None
    """The stop string that ended the choice."""
    version: str | None = None
    """Of the weights that sampled it."""


Item = PrefillStarted | SampledToken | EngineError


class ResultQueue:
    """What the worker tells one call: filled from the worker through the loop, read by the call's own task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: list[Item] = []
        self._ready = asyncio.Event()

    def put(self, item: Item) -> None:
        """On the loop's own thread only."""
        self._items.append(item)
        self._ready.set()

    async def take(self) -> list[Item]:
        """All that came since the last call; waits for something."""
        await self._ready.wait()
        self._ready.clear()
        items, self._items = self._items, []
        return items


@dataclass(slots=True)
class Generation:
    """One call: the same prompt for each of `samplers`, one choice each. `prompt` int32 [n], n >= 1."""

    prompt: TokenIds
    samplers: Sequence[SequenceSampler]
    max_tokens: int
    stop: tuple[str, ...]
    outbox: ResultQueue
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice. tokens[:count] are prompt and answer, the first `kv_len` of them are in the cache."""

    work: Generation
    index: int
    sampler: SequenceSampler
    stream: TextStream
    tokens: TokenIds
    count: int
    kv_len: int = 0
    kv: SequenceKV | None = None
    """Its own tensors while it is prefilled; then it lives in a slot."""
    started: bool = False

    @property
    def known(self) -> TokenIds:
        return self.tokens[: self.kv_len]


@dataclass(slots=True)
class WorkerTask:
    """Something else the worker must do between steps, a part at each step: scoring, new weights."""

    parts: Generator[None, None, Any]
    future: Future[Any] = field(default_factory=Future)
    begun: bool = False


class BatchPool:
    """Running rows of at most `limit` positions, batched together: row i is in slot i.

    Pools of growing limits keep one long sequence from making every short one pay for its length.
    """

    def __init__(self, shape: KVShape, max_rows: int, limit: int) -> None:
        self.limit = limit
        self.slots = BatchKV(shape, max_rows, limit)
        self.rows: list[SequenceState] = []

    def data(self, slot: int) -> torch.Tensor:
        """[layers, 2, 1, heads, capacity, head_dim], a view."""
        return self.slots.row(slot)

    def add(self, row: SequenceState, data: torch.Tensor) -> None:
        """Copy the row's keys and values from `data` into the next free slot."""
        self.slots.fit(row.kv_len + 1, [other.kv_len for other in self.rows])
        self.slots.put(len(self.rows), data, row.kv_len)
        self.rows.append(row)

    def remove(self, slot: int) -> None:
        """Take a row out; the last row moves into its slot."""
        last = self.rows.pop()
        if slot < len(self.rows):
            self.slots.put(slot, self.slots.row(len(self.rows)), last.kv_len)
            self.rows[slot] = last


def hand_out(letters: Iterable[tuple[ResultQueue, Item]]) -> None:
    """Give each outbox its items, with one wake-up for each event loop. From the worker thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[ResultQueue, Item]]] = {}
    for letter in letters:
        by_loop.setdefault(letter[0].loop, []).append(letter)
    for loop, batch in by_loop.items():
        _call_on(loop, partial(_put_all, batch))


def _put_all(batch: list[tuple[ResultQueue, Item]]) -> None:
    for outbox, item in batch:
        outbox.put(item)


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # A loop that was closed has nobody left to tell; its calls are cancelled by their generators' end.
        if not loop.is_closed():
            raise
