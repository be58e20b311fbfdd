"""Continuous batching: one thread owns the model and runs step after step while there is work.

A step drops cancelled sequences, admits waiting ones, prefills a bounded number of prompt tokens (so that a long prompt
does not stall the others), samples one token for every sequence whose prompt is prefilled, and delivers the results to
the event loop in one call. The last token of a prompt is not prefilled: it goes through the model together with the
last tokens of the other sequences.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from polar_proxy.engines.local.model import MIN_REUSE, ModelRunner, PrefixCache
from polar_proxy.engines.local.sampling import SampledToken, SequenceSampler, sample_tokens
from polar_proxy.engines.local.tokenizer import ChatTokenizer, TextStream
from polar_proxy.errors import EngineError
from polar_proxy.sequences import common_prefix_length
from polar_proxy.types import SampleEvent, TokenIds, TopLogprob

logger = logging.getLogger(__name__)
T = TypeVar("T")

PREFILL_TOKENS = 256
"""Maximum number of prompt tokens, of all sequences together, that one step prefills."""
CACHE_BYTES = 1 << 29
"""Maximum size of the kept keys and values of finished sequences, in bytes. Running sequences are not counted."""
SMALL_MODEL = 20_000_000
"""Models with fewer parameters run in one thread, which is as fast as several, and far faster if other cores are
busy."""
ANSWER_ROOM = 512
"""Number of positions for the answer in a new KV buffer. The buffer doubles when it is full."""


@dataclass(slots=True)
class Generation:
    """One call: a prompt (int32 [n], n >= 1) and a sampler for each choice."""

    prompt: TokenIds
    samplers: Sequence[SequenceSampler]
    max_tokens: int
    stop: tuple[str, ...]
    results: asyncio.Queue[SampleEvent | EngineError] = field(default_factory=asyncio.Queue)
    """One event for each token, with its raw text. An error ends the answer. Used on the event loop only."""
    cancelled: bool = False
    prompt_reported: bool = False
    """True if the first event, with the prompt's ids, was delivered."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice of a generation.

    `tokens[:count]`: prompt and answer so far. `kv`: keys and values of the first `kv_length` of these tokens.
    """

    generation: Generation
    index: int
    text: TextStream
    tokens: TokenIds
    count: int
    kv: torch.Tensor | None = None
    kv_length: int = 0

    @property
    def sampler(self) -> SequenceSampler:
        return self.generation.samplers[self.index]

    @property
    def unread(self) -> int:
        """Number of tokens without keys and values. At 1 (the last token), the sequence is ready to decode."""
        return self.count - self.kv_length


class BatchScheduler:
    """Owner of the worker thread. `submit`, `run` and `close` may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: ChatTokenizer,
        end_ids: frozenset[int],
        *,
        loop: asyncio.AbstractEventLoop,
        max_batch: int,
    ) -> None:
        self.end_ids = end_ids
        """Tokens that end an answer."""
        self.version = "0"
        """Policy version of the loaded weights; changed by `weights_changed` only."""
        self.failure: str | None = None
        """Why the worker no longer serves; None while it does."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._loop = loop
        self._max_batch = max_batch
        self._waiting: deque[SequenceState] = deque()
        self._active: list[SequenceState] = []
        self._stepping = False
        """True while a step is queued or runs."""
        self._prefixes = PrefixCache(CACHE_BYTES)
        self._results: list[tuple[Generation, SampleEvent | EngineError]] = []
        self._executor = ThreadPoolExecutor(1, "polar-local-engine")
        if runner.parameter_count < SMALL_MODEL:
            self._executor.submit(torch.set_num_threads, 1)

    def submit(self, generation: Generation) -> None:
        """Queue a call. Raises EngineError if the worker has stopped."""
        self._waiting.extend(self._new_sequence(generation, index) for index in range(len(generation.samplers)))
        self.run(self._start_stepping)

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the worker, between two steps. Raises EngineError if the worker has stopped."""

        def run_unless_stopped() -> T:
            if self.failure is not None:
                raise EngineError(self.failure, status=503)
            return function()

        try:
            return self._executor.submit(run_unless_stopped)
        except RuntimeError as error:
            raise EngineError(self.failure or str(error), status=503) from error

    def close(self) -> None:
        """Stop after the current step and join the thread; running calls get an EngineError."""
        with suppress(EngineError):  # the worker has stopped by itself
            self.run(lambda: self._stop(EngineError("The local engine was shut down.", status=503))).result()
        self._executor.shutdown()

    @property
    def unfinished(self) -> int:
        """Number of choices that wait or run."""
        return len(self._waiting) + len(self._active)

    def _new_sequence(self, generation: Generation, index: int) -> SequenceState:
        count = len(generation.prompt)
        tokens = np.empty(count + generation.max_tokens, dtype=np.int32)
        tokens[:count] = generation.prompt
        return SequenceState(generation, index, self._tokenizer.stream(generation.stop), tokens, count)

    # Everything below runs on the worker thread.

    def weights_changed(self, version: str) -> None:
        """Use `version` from now on. Drop all keys and values, so that running sequences are prefilled again."""
        self.version = version
        self._prefixes.clear()
        for sequence in self._active:
            sequence.kv, sequence.kv_length = None, 0

    def _start_stepping(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._step()

    def _step(self) -> None:
        """Run one step. If work is left, queue the next step behind the functions that `run` has queued."""
        try:
            with torch.inference_mode():
                self._drop_cancelled()
                self._admit()
                self._prefill()
                self._decode()
            self._deliver()
            self._stepping = self.unfinished > 0 and self.failure is None
            if self._stepping:
                self._executor.submit(self._step)
        except Exception as cause:
            # Every waiting caller gets the error, and `health` reports it from now on.
            logger.exception("the local engine's worker failed")
            error = EngineError(f"The local engine failed: {type(cause).__name__}: {cause}", status=500)
            error.__cause__ = cause
            self._stop(error)

    def _drop_cancelled(self) -> None:
        for sequence in [sequence for sequence in self._active if sequence.generation.cancelled]:
            self._retire(sequence)

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._max_batch:
            sequence = self._waiting.popleft()
            if not sequence.generation.cancelled:
                self._active.append(sequence)

    def _prefill(self) -> None:
        """Prefill up to PREFILL_TOKENS prompt tokens.

        The sequence with the fewest tokens left goes first, so short prompts pass long ones. If two prompts are equal,
        only one is prefilled, and the other copies its keys and values.
        """
        budget = PREFILL_TOKENS
        while budget > 0:
            unready = [sequence for sequence in self._active if sequence.kv is None or sequence.unread > 1]
            if not unready:
                return
            sequence = min(unready, key=lambda sequence: sequence.unread)
            kv = sequence.kv
            if kv is None:
                kv = self._allocate_kv(sequence)
                self._report_prompt(sequence)
            start = sequence.kv_length
            chunk = sequence.tokens[start : min(sequence.count - 1, start + budget)]
            if len(chunk):
                self._runner.extend(kv, chunk.tolist(), start)
                sequence.kv_length += len(chunk)
                budget -= len(chunk)

    def _allocate_kv(self, sequence: SequenceState) -> torch.Tensor:
        """Give a sequence a new KV buffer and return the buffer. The longest prefix that the sequence shares with the
        cache or with a running sequence is copied into the buffer, unless the prefix is very short."""
        wanted = sequence.tokens[: sequence.count - 1]
        length, source = self._prefixes.find(wanted)
        for other in self._active:
            common = common_prefix_length(wanted, other.tokens[: other.kv_length])
            if common > length and common >= MIN_REUSE:
                length, source = common, other.kv
        kv = sequence.kv = self._runner.new_kv(sequence.count + ANSWER_ROOM)
        if source is not None:
            kv[..., :length, :] = source[..., :length, :]
            sequence.kv_length = length
        return kv

    def _report_prompt(self, sequence: SequenceState) -> None:
        """Report the prompt's ids and the number of cached ones, unless another choice of the generation did."""
        generation = sequence.generation
        if not generation.prompt_reported:
            generation.prompt_reported = True
            event = SampleEvent(prompt_ids=generation.prompt.tolist(), cached_tokens=sequence.kv_length)
            self._results.append((generation, event))

    def _decode(self) -> None:
        """Pass the last token of each prefilled sequence through the model, and sample the next one."""
        ready = [sequence for sequence in self._active if sequence.kv is not None and sequence.unread == 1]
        if not ready:
            return
        positions = [sequence.kv_length for sequence in ready]
        last = [int(sequence.tokens[sequence.kv_length]) for sequence in ready]
        logits = self._runner.step([self._room_for_one(sequence) for sequence in ready], last, positions)
        sampled = sample_tokens(logits, [sequence.sampler for sequence in ready])
        for sequence, token in zip(ready, sampled, strict=True):
            sequence.kv_length += 1
            self._accept(sequence, token)

    def _room_for_one(self, sequence: SequenceState) -> torch.Tensor:
        """Return the KV buffer of a sequence, with room for at least one more token. A full buffer is doubled first."""
        kv = sequence.kv
        assert kv is not None
        capacity = kv.shape[-2]
        if sequence.kv_length == capacity:
            sequence.kv = self._runner.new_kv(2 * capacity)
            sequence.kv[..., :capacity, :] = kv
            return sequence.kv
        return kv

    def _accept(self, sequence: SequenceState, token: SampledToken) -> None:
        """Append a sampled token to its sequence and report it; if it ends the answer, retire the sequence."""
        generation, stream = sequence.generation, sequence.text
        grammar = sequence.sampler.grammar
        if grammar is not None and grammar.error is not None:
            error = EngineError(f"The grammar of this request failed: {grammar.error}", status=500)
            self._results.append((generation, error))
            generation.cancelled = True
            return
        sequence.tokens[sequence.count] = token.token_id
        sequence.count += 1
        finish: str | None = None
        text = ""
        if token.token_id in self.end_ids:
            finish = "stop"
        else:
            text = stream.feed(token.token_id)
            if stream.stopped_at is not None:
                finish = "stop"
            elif sequence.count == len(sequence.tokens):
                finish = "length"
        if finish is not None:
            text += stream.close()
            self._retire(sequence)
        event = SampleEvent(
            index=sequence.index,
            text=text,
            token_ids=(token.token_id,),
            logprobs=(token.logprob,),
            tokens=(self._tokenizer.decode([token.token_id]),),
            top=(tuple([TopLogprob(other, self._tokenizer.decode([other]), value) for other, value in token.top]),),
            finish_reason=finish,
            stop_sequence=stream.stopped_at,
            weight_version=self.version,
        )
        self._results.append((generation, event))

    def _retire(self, sequence: SequenceState) -> None:
        """Take a sequence out of the batch and keep its keys and values for a later turn."""
        self._active.remove(sequence)
        if sequence.kv is not None:
            self._prefixes.keep(sequence.tokens[: sequence.kv_length], sequence.kv)

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

    def _stop(self, error: EngineError) -> None:
        """Give the error to all callers, and accept no more calls."""
        self.failure = str(error)
        self._executor.shutdown(wait=False)
        for generation in {id(s.generation): s.generation for s in [*self._waiting, *self._active]}.values():
            self._results.append((generation, error))
        self._waiting.clear()
        self._active.clear()
        self._prefixes.clear()
        self._deliver()


def _put_all(results: list[tuple[Generation, SampleEvent | EngineError]]) -> None:
    for generation, result in results:
        generation.results.put_nowait(result)
