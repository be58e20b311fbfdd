"""Continuous batching: one thread owns the model and runs step after step while there is work.

A step drops cancelled sequences, admits waiting ones, prefills a bounded number of prompt tokens (so that a long prompt
does not stall the others), samples one token for every running sequence, and delivers the results to the event loop in
one call. A sequence leaves the batch with its last token; the last sequence of the batch moves into its slot.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from polar_proxy.engines.local.model import MIN_REUSE, BatchKV, ModelRunner, PrefixCache, common_prefix
from polar_proxy.engines.local.sampling import SequenceSampler, sample_tokens
from polar_proxy.engines.local.tokenizer import TextStream, Vocabulary
from polar_proxy.errors import EngineError
from polar_proxy.types import TokenIds

logger = logging.getLogger(__name__)
T = TypeVar("T")

PREFILL_ALONE, PREFILL_SHARED = 1024, 256
"""Prompt tokens per step: when nothing else runs, and while other sequences wait for their next token."""


class PrefillStarted(NamedTuple):
    """Prefill of the first choice begins; `cached_tokens` of the prompt were found in the prefix cache."""

    cached_tokens: int


class SampledToken(NamedTuple):
    """One sampled token of one choice. `text` may come later than the token; `finish` is "stop" or "length" with the
    last token."""

    choice: int
    token_id: int
    logprob: float
    text: str
    top: list[tuple[int, float]]
    finish: str | None
    stop: str | None
    """The stop string that ended the choice."""
    version: str
    """Policy version of the weights that sampled the token."""


Result = PrefillStarted | SampledToken | EngineError


@dataclass(slots=True)
class Generation:
    """One call: a prompt (int32 [n], n >= 1) and a sampler for each choice."""

    prompt: TokenIds
    samplers: Sequence[SequenceSampler]
    max_tokens: int
    stop: tuple[str, ...]
    results: asyncio.Queue[Result] = field(default_factory=asyncio.Queue)
    """Filled and read on the event loop."""
    cancelled: bool = False

    async def take(self) -> list[Result]:
        """Wait for a result, and return all that have arrived."""
        results = [await self.results.get()]
        while not self.results.empty():
            results.append(self.results.get_nowait())
        return results


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice of a generation. `tokens[:count]` are prompt and answer; keys of the first `kv_length` are cached."""

    generation: Generation
    index: int
    sampler: SequenceSampler
    text: TextStream
    tokens: TokenIds
    count: int
    kv_length: int = 0
    prefill_kv: torch.Tensor | None = None
    """Its own keys and values while its prompt is prefilled; afterwards they are in a slot of the batch."""
    announced: bool = False

    @property
    def cached_tokens(self) -> TokenIds:
        return self.tokens[: self.kv_length]


@dataclass(slots=True)
class WorkerTask:
    """Other work for the worker thread, one part between two steps: scoring, new weights."""

    parts: Generator[None, None, Any]
    future: Future[Any] = field(default_factory=Future)
    started: bool = False


class BatchScheduler:
    """Own the worker thread. `submit`, `run_task`, `wake` and `close` may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        vocabulary: Vocabulary,
        end_ids: frozenset[int],
        *,
        max_batch: int,
        kv_bytes: int,
        threads: int | None,
    ) -> None:
        self.end_ids = end_ids
        """Tokens that end an answer."""
        self.version = "0"
        """Policy version of the loaded weights; changed by `weights_changed` only."""
        self.failure: str | None = None
        """Why the worker no longer serves; None while it does."""
        self._runner = runner
        self._vocabulary = vocabulary
        self._max_batch = max_batch
        self._threads = threads
        self._condition = threading.Condition()
        self._submitted: list[SequenceState] = []
        self._tasks: deque[WorkerTask] = deque()
        self._closing = False
        self._waiting: deque[SequenceState] = deque()
        self._prefilling: list[SequenceState] = []
        self._running: list[SequenceState] = []
        """The sequence at index i is in slot i of the batch."""
        self._batch = BatchKV(runner.shape, max_batch, runner.context_length)
        self._prefixes = PrefixCache(kv_bytes)
        self._results: list[tuple[Generation, Result]] = []
        self._thread = threading.Thread(target=self._work, name="polar-local-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the worker; results are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Queue a call. Raises EngineError if the worker has stopped."""
        sequences = [self._new_sequence(generation, index) for index in range(len(generation.samplers))]
        with self._condition:
            self._check_alive()
            self._submitted += sequences
            self._condition.notify()

    def run_task(self, parts: Generator[None, None, T]) -> Future[T]:
        """Run a generator on the worker, one part between two steps. Tasks run one after another."""
        task = WorkerTask(parts)
        with self._condition:
            self._check_alive()
            self._tasks.append(task)
            self._condition.notify()
        return task.future

    def wake(self) -> None:
        """Make the worker look at cancelled calls now."""
        with self._condition:
            self._condition.notify()

    def close(self) -> None:
        """Stop at the next step and join the thread; running calls get an EngineError."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def weights_changed(self, version: str) -> None:
        """Drop all keys and values; running sequences are prefilled again. Called on the worker, from a task."""
        self.version = version
        self._prefixes.clear()
        self._prefilling += self._running
        self._running = []
        for sequence in self._prefilling:
            sequence.prefill_kv, sequence.kv_length = None, 0

    @property
    def unfinished(self) -> int:
        """Number of choices that wait or run."""
        return len(self._submitted) + len(self._waiting) + len(self._prefilling) + len(self._running)

    def _check_alive(self) -> None:
        if self.failure is not None or self._closing:
            raise EngineError(self.failure or "The local engine is shut down.", status=503)

    def _new_sequence(self, generation: Generation, index: int) -> SequenceState:
        count = len(generation.prompt)
        tokens = np.empty(count + generation.max_tokens, dtype=np.int32)
        tokens[:count] = generation.prompt
        text = TextStream(self._vocabulary.decoder(), generation.stop)
        return SequenceState(generation, index, generation.samplers[index], text, tokens, count)

    # Everything below runs on the worker thread.

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        error = EngineError("The local engine was shut down.", status=503)
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
        except Exception as cause:
            # The thread ends here. Every waiting caller gets the error, and `health` reports it from now on.
            logger.exception("the local engine's worker failed")
            error = EngineError(f"The local engine failed: {type(cause).__name__}: {cause}", status=500)
            error.__cause__ = cause
        self._fail_all(error)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; return False when the scheduler closes."""
        with self._condition:
            while not (self._closing or self._tasks or self.unfinished):
                self._batch.shrink()
                self._condition.wait()
            self._waiting.extend(self._submitted)
            self._submitted = []
            return not self._closing

    def _step(self) -> None:
        self._advance_task()
        self._drop_cancelled()
        while self._waiting and len(self._prefilling) + len(self._running) < self._max_batch:
            self._prefilling.append(self._waiting.popleft())
        self._prefill(PREFILL_SHARED if self._running else PREFILL_ALONE)
        self._decode()
        self._deliver()

    def _advance_task(self) -> None:
        if not self._tasks:
            return
        task = self._tasks[0]
        wanted = task.started or task.future.set_running_or_notify_cancel()
        task.started = True
        try:
            if wanted:
                next(task.parts)
                return
        except StopIteration as stop:
            task.future.set_result(stop.value)
        except Exception as error:  # noqa: BLE001 - passed on to the caller that awaits the task
            task.future.set_exception(error)
        with self._condition:
            self._tasks.popleft()

    def _drop_cancelled(self) -> None:
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.generation.cancelled)
        for sequence in [sequence for sequence in self._prefilling if sequence.generation.cancelled]:
            self._prefilling.remove(sequence)
            if sequence.prefill_kv is not None:
                self._prefixes.keep(sequence.cached_tokens.copy(), sequence.prefill_kv)
        self._retire([slot for slot, sequence in enumerate(self._running) if sequence.generation.cancelled])

    def _prefill(self, budget: int) -> None:
        """Prefill up to `budget` prompt tokens.

        The sequence with the fewest tokens left goes first: short prompts pass long ones, and the second of two equal
        prompts finds the keys of the first.
        """
        while budget > 0 and self._prefilling:
            sequence = min(self._prefilling, key=lambda sequence: sequence.count - sequence.kv_length)
            kv = sequence.prefill_kv
            if kv is None:
                kv = sequence.prefill_kv = self._start_prefill(sequence)
            start, left = sequence.kv_length, sequence.count - sequence.kv_length
            count = self._runner.chunk_size(start, min(budget, left))
            logits = self._runner.extend(kv, sequence.tokens[start : start + count].tolist(), start)
            sequence.kv_length += count
            budget -= count
            if sequence.kv_length == sequence.count:
                self._start_decoding(sequence, kv, logits)

    def _start_prefill(self, sequence: SequenceState) -> torch.Tensor:
        """Return a KV buffer for the sequence, with the longest cached prefix of its tokens copied into it.

        The last token is always computed, because its logits are needed.
        """
        wanted = sequence.tokens[: sequence.count - 1]
        best, source = self._prefixes.find(wanted)
        live = [(other, self._batch.row(slot)) for slot, other in enumerate(self._running)]
        live += [(other, other.prefill_kv) for other in self._prefilling if other.prefill_kv is not None]
        for other, data in live:
            common = common_prefix(wanted, other.cached_tokens)
            if common > best and common >= MIN_REUSE:
                best, source = common, data
        kv = self._runner.shape.zeros(1, sequence.count)
        if source is not None:
            kv[..., :best, :] = source[..., :best, :]
            sequence.kv_length = best
        if sequence.index == 0 and not sequence.announced:
            self._results.append((sequence.generation, PrefillStarted(best)))
            sequence.announced = True
        return kv

    def _start_decoding(self, sequence: SequenceState, kv: torch.Tensor, logits: torch.Tensor) -> None:
        """Sample the first token of a prefilled sequence and move it into the batch."""
        self._prefilling.remove(sequence)
        sequence.prefill_kv = None
        sampled = sample_tokens(logits[None], [sequence.sampler])
        if self._accept(sequence, sampled.ids[0], sampled.logprobs[0], sampled.top[0]):
            self._prefixes.keep(sequence.cached_tokens.copy(), kv)
            return
        self._batch.reserve(sequence.kv_length + 1, [other.kv_length for other in self._running])
        self._batch.put(len(self._running), kv, sequence.kv_length)
        self._running.append(sequence)

    def _decode(self) -> None:
        """Run one step of the batch: the last token of each sequence goes in, the next one comes out."""
        if not self._running:
            return
        positions = [sequence.kv_length for sequence in self._running]
        self._batch.reserve(max(positions) + 1, positions)
        last = [int(sequence.tokens[sequence.kv_length]) for sequence in self._running]
        logits = self._runner.step(self._batch, last, positions)
        sampled = sample_tokens(logits, [sequence.sampler for sequence in self._running])
        finished: list[int] = []
        for slot, sequence in enumerate(self._running):
            sequence.kv_length += 1
            if self._accept(sequence, sampled.ids[slot], sampled.logprobs[slot], sampled.top[slot]):
                finished.append(slot)
        self._retire(finished)

    def _accept(self, sequence: SequenceState, token_id: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        """Append a sampled token to its sequence and report it; return whether it was the last."""
        sequence.tokens[sequence.count] = token_id
        sequence.count += 1
        grammar = sequence.sampler.grammar
        if grammar is not None and grammar.error is not None:
            error = EngineError(f"The grammar of this request failed: {grammar.error}", status=500)
            self._results.append((sequence.generation, error))
            sequence.generation.cancelled = True
            return True
        finish: str | None = None
        text = ""
        if token_id in self.end_ids:
            finish = "stop"
        else:
            text = sequence.text.feed(token_id)
            if sequence.text.stopped_at is not None:
                finish = "stop"
            elif sequence.count == len(sequence.tokens):
                finish = "length"
        if finish is not None:
            text += sequence.text.close()
        stop = sequence.text.stopped_at
        token = SampledToken(sequence.index, token_id, logprob, text, top, finish, stop, self.version)
        self._results.append((sequence.generation, token))
        return finish is not None

    def _retire(self, slots: Sequence[int]) -> None:
        """Take sequences out of the batch and keep their keys and values for a later turn."""
        for slot in sorted(slots, reverse=True):
            self._prefixes.keep(self._running[slot].cached_tokens.copy(), self._batch.row(slot))
            last = self._running.pop()
            if slot < len(self._running):
                self._batch.put(slot, self._batch.row(len(self._running)), last.kv_length)
                self._running[slot] = last

    def _deliver(self) -> None:
        """Hand all results to the event loop in one call."""
        results, self._results = self._results, []
        if not results:
            return
        try:
            self._loop.call_soon_threadsafe(_put_all, results)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop has no reader left
                raise

    def _fail_all(self, error: EngineError) -> None:
        with self._condition:
            self.failure = str(error)
            sequences = [*self._submitted, *self._waiting, *self._prefilling, *self._running]
            tasks, self._tasks = list(self._tasks), deque()
            self._submitted, self._prefilling, self._running = [], [], []
            self._waiting.clear()
        for task in tasks:
            if task.started or task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)
        for generation in {id(sequence.generation): sequence.generation for sequence in sequences}.values():
            self._results.append((generation, error))
        self._deliver()
        self._prefixes.clear()


def _put_all(results: list[tuple[Generation, Result]]) -> None:
    for generation, result in results:
        generation.results.put_nowait(result)
