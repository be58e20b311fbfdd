"""Continuous batching: one thread owns the model and runs step after step while there is work.

A step drops what was cancelled, admits what waits, puts a bounded number of prompt tokens through (so that a long
prompt does not stall the others), samples one token for every running row, and hands what came out to the event
loops in one call each. A row leaves the batch with its last token; the last row moves into its slot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from polar_proxy.engines.local.kv_cache import MIN_REUSE, PrefixCache, SequenceKV, common_prefix
from polar_proxy.engines.local.model import ModelRunner
from polar_proxy.engines.local.sampling import SampledBatch, SequenceSampler, draw
from polar_proxy.engines.local.tokenizer import TextStream, Vocabulary
from polar_proxy.engines.local.work import (
    BatchPool,
    Generation,
    Item,
    PrefillStarted,
    ResultQueue,
    SampledToken,
    SequenceState,
    WorkerTask,
    hand_out,
)
from polar_proxy.errors import EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PREFILL_MOST, PREFILL_LEAST = 1024, 64
"""Prompt tokens of one step: the most when nothing else runs, and bounds when rows wait for their next token."""
PREFILL_SECONDS = 0.05
"""How long rows may wait for another's prompt at each step; its number of tokens follows from the measured speed."""


def pool_limits(context_length: int, first: int = 4096) -> list[int]:
    """Lengths at which rows move on: each four times the one before, up to the whole context."""
    limits = [first]
    while limits[-1] < context_length:
        limits.append(4 * limits[-1])
    return [min(limit, context_length) for limit in limits]


class BatchScheduler:
    """Owns the worker thread. `submit`, `run_job`, `wake` and `close` may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        vocabulary: Vocabulary,
        eos_ids: frozenset[int],
        *,
        max_batch: int,
        kv_bytes: int,
        threads: int | None,
    ) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._eos = eos_ids
        self._max_batch = max_batch
        self._threads = threads
        self._prefixes = PrefixCache(kv_bytes)
        self._pools = [BatchPool(runner.shape, max_batch, limit) for limit in pool_limits(runner.context_length)]
        self._work_ready = threading.Condition()
        self._new: list[SequenceState] = []
        self._jobs: deque[WorkerTask] = deque()
        self._closing = False
        self._shared_budget = 4 * PREFILL_LEAST
        self._waiting: deque[SequenceState] = deque()
        self._prefilling: list[SequenceState] = []
        self._letters: list[tuple[ResultQueue, Item]] = []
        self.version = "0"
        """Of the weights, told with every token. Changed on the worker only, by `weights_changed`."""
        self.failure: str | None = None
        """Why the worker no longer serves; None while it does."""
        self._thread = threading.Thread(target=self._main, name="polar-local-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Generation) -> None:
        """Queue a call. Raises EngineError when the worker is gone."""
        rows = [self._new_row(work, index, sampler) for index, sampler in enumerate(work.samplers)]
        with self._work_ready:
            self._check_alive()
            self._new += rows
            self._work_ready.notify()

    def run_job(self, parts: Generator[None, None, T]) -> Future[T]:
        """Run a generator on the worker, one part between two steps; jobs run one after another."""
        job = WorkerTask(parts)
        with self._work_ready:
            self._check_alive()
            self._jobs.append(job)
            self._work_ready.notify()
        return job.future

    def wake(self) -> None:
        """Look at cancelled calls now."""
        with self._work_ready:
            self._work_ready.notify()

    def close(self) -> None:
        """Stop at the next step and join the thread; calls in flight get an EngineError."""
        with self._work_ready:
            self._closing = True
            self._work_ready.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def weights_changed(self, version: str) -> None:
        """On the worker only (from a job): forget all keys and values; running rows compute theirs anew."""
        self.version = version
        self._prefixes.clear()
        for pool in self._pools:
            self._prefilling += pool.rows
            pool.rows = []
        for row in self._prefilling:
            row.kv, row.kv_len = None, 0

    def _check_alive(self) -> None:
        if self.failure is not None or self._closing:
            raise EngineError(self.failure or "The local engine is shut down.", status=503)

    def _new_row(self, work: Generation, index: int, sampler: SequenceSampler) -> SequenceState:
        count = len(work.prompt)
        tokens = np.empty(count + work.max_tokens, dtype=np.int32)
        tokens[:count] = work.prompt
        return SequenceState(work, index, sampler, TextStream(self._vocabulary.decoder(), work.stop), tokens, count)

    # From here on: the worker thread.

    def _main(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        error = EngineError("The local engine was shut down.", status=503)
        try:
            with torch.inference_mode():
                while self._await_work():
                    self._step()
        except Exception as cause:
            # The thread's end: nothing is swallowed, everyone who waits is told, health() says it from now on.
            logger.exception("the local engine's worker failed")
            error = EngineError(f"The local engine failed: {type(cause).__name__}: {cause}", status=500)
            error.__cause__ = cause
        self._fail_all(error)

    def _await_work(self) -> bool:
        with self._work_ready:
            while not (self._closing or self._new or self._jobs or self._busy):
                for pool in self._pools:
                    pool.slots.shrink()
                self._work_ready.wait()
            self._waiting.extend(self._new)
            self._new = []
            return not self._closing

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    @property
    def _running(self) -> int:
        return sum(len(pool.rows) for pool in self._pools)

    def _step(self) -> None:
        if self._jobs:
            self._advance_job(self._jobs[0])
        self._drop_cancelled()
        while self._waiting and len(self._prefilling) + self._running < self._max_batch:
            self._prefilling.append(self._waiting.popleft())
        if self._prefilling:
            self._prefill_step()
        for pool in self._pools:
            self._promote(pool)
            if pool.rows:
                self._decode(pool)
        self._deliver()

    def _advance_job(self, job: WorkerTask) -> None:
        wanted = job.begun or job.future.set_running_or_notify_cancel()
        job.begun = True
        try:
            if wanted:
                next(job.parts)
                return
        except StopIteration as stop:
            job.future.set_result(stop.value)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the job
            job.future.set_exception(error)
        with self._work_ready:
            self._jobs.popleft()

    def _drop_cancelled(self) -> None:
        if any(row.work.cancelled for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.work.cancelled)
        for row in [row for row in self._prefilling if row.work.cancelled]:
            self._prefilling.remove(row)
            if row.kv is not None:
                self._prefixes.keep(row.known.copy(), row.kv.data)
        for pool in self._pools:
            self._retire(pool, [slot for slot, row in enumerate(pool.rows) if row.work.cancelled])

    def _prefill_step(self) -> None:
        """Prefill with a budget: all that fits when nothing else runs, else about PREFILL_SECONDS' worth."""
        if not self._running:
            self._prefill(PREFILL_MOST)
            return
        began = time.perf_counter()
        used_up = self._prefill(self._shared_budget)
        pace = PREFILL_SECONDS / (time.perf_counter() - began)
        if used_up or pace < 1:
            budget = int(self._shared_budget * min(max(pace, 0.5), 2.0))
            self._shared_budget = min(max(budget, PREFILL_LEAST), PREFILL_MOST)

    def _prefill(self, budget: int) -> bool:
        """Put up to `budget` prompt tokens through. The row with least left goes first: short prompts pass long
        ones, and the second of two equal prompts finds the first one's keys. True when the budget ran out."""
        while budget > 0 and self._prefilling:
            row = min(self._prefilling, key=lambda row: row.count - row.kv_len)
            kv = row.kv or self._begin(row)
            count = self._runner.chunk_size(row.kv_len, min(budget, row.count - row.kv_len))
            count = min(count, row.count - row.kv_len)
            chunk = row.tokens[row.kv_len : row.kv_len + count].tolist()
            logits = self._runner.extend(kv, chunk, row.kv_len)
            row.kv_len += count
            budget -= count
            if row.kv_len == row.count:
                self._enter_batch(row, kv, draw(logits[None], [row.sampler]))
        return budget <= 0

    def _begin(self, row: SequenceState) -> SequenceKV:
        """Find the longest known beginning of the row's tokens, all but the last (whose logits are needed)."""
        tokens = row.tokens[: row.count]
        limit = row.count - 1
        best, source = self._prefixes.find(tokens[:limit])
        live = [(other, pool.data(slot)) for pool in self._pools for slot, other in enumerate(pool.rows)]
        live += [(other, other.kv.data) for other in self._prefilling if other.kv is not None]
        for other, data in live:
            common = common_prefix(tokens[:limit], other.known)
            if common > best and common >= MIN_REUSE:
                best, source = common, data
        row.kv = SequenceKV(self._runner.shape, row.count)
        if source is not None:
            row.kv.take(source, best)
            row.kv_len = best
        if row.index == 0 and not row.started:
            self._letters.append((row.work.outbox, PrefillStarted(best)))
            row.started = True
        return row.kv

    def _enter_batch(self, row: SequenceState, kv: SequenceKV, drawn: SampledBatch) -> None:
        self._prefilling.remove(row)
        if self._accept(row, drawn.ids[0], drawn.logprobs[0], drawn.top[0]):
            self._prefixes.keep(row.known.copy(), kv.data)
        else:
            self._pool_for(row).add(row, kv.data)
        row.kv = None

    def _pool_for(self, row: SequenceState) -> BatchPool:
        return next(pool for pool in self._pools if row.kv_len < pool.limit)

    def _promote(self, pool: BatchPool) -> None:
        """Move rows that have outgrown this pool on to the next."""
        for slot in [slot for slot, row in enumerate(pool.rows) if row.kv_len >= pool.limit][::-1]:
            row = pool.rows[slot]
            self._pool_for(row).add(row, pool.data(slot))
            pool.remove(slot)

    def _decode(self, pool: BatchPool) -> None:
        """One token for every row of the pool: its last token goes in, the next comes out."""
        rows = pool.rows
        positions = [row.kv_len for row in rows]
        pool.slots.fit(max(positions) + 1, positions)
        last = [int(row.tokens[row.kv_len]) for row in rows]
        drawn = draw(self._runner.step(pool.slots, last, positions), [row.sampler for row in rows])
        done: list[int] = []
        for slot, row in enumerate(rows):
            row.kv_len += 1
            if self._accept(row, drawn.ids[slot], drawn.logprobs[slot], drawn.top[slot]):
                done.append(slot)
        self._retire(pool, done)

    def _accept(self, row: SequenceState, token_id: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        """Add a sampled token to its row and tell it; True when it was the last."""
        row.tokens[row.count] = token_id
        row.count += 1
        if row.sampler.grammar is not None and row.sampler.grammar.error is not None:
            error = EngineError(f"The grammar of this request failed: {row.sampler.grammar.error}", status=500)
            self._letters.append((row.work.outbox, error))
            row.work.cancelled = True
            return True
        finish: str | None = None
        text = ""
        if token_id in self._eos:
            finish = "stop"
        else:
            text = row.stream.feed(token_id)
            if row.stream.stopped_at is not None:
                finish = "stop"
            elif row.count == len(row.tokens):
                finish = "length"
        if finish is not None:
            text += row.stream.close()
        piece = SampledToken(row.index, token_id, logprob, text, top, finish, row.stream.stopped_at, self.version)
        self._letters.append((row.work.outbox, piece))
        return finish is not None

    def _retire(self, pool: BatchPool, slots: Sequence[int]) -> None:
        """Take rows out of the batch and keep their keys for a later turn."""
        for slot in sorted(slots, reverse=True):
            self._prefixes.keep(pool.rows[slot].known.copy(), pool.data(slot))
            pool.remove(slot)

    def _deliver(self) -> None:
        letters, self._letters = self._letters, []
        hand_out(letters)

    def _fail_all(self, error: EngineError) -> None:
        with self._work_ready:
            self.failure = str(error)
            running = [row for pool in self._pools for row in pool.rows]
            rows = [*self._new, *self._waiting, *self._prefilling, *running]
            jobs, self._jobs = list(self._jobs), deque()
        for job in jobs:
            if job.begun or job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        for outbox in {id(row.work): row.work.outbox for row in rows}.values():
            self._letters.append((outbox, error))
        self._deliver()
        self._new, self._prefilling, self._pools = [], [], []
        self._waiting.clear()
        self._prefixes.clear()
