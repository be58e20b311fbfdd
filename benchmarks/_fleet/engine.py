"""A model of an inference server: continuous batching, prefix caching, prefill and decode.

* Requests wait, first come first served, until their tokens fit into the cache (`kv_tokens`) and the batch (`batch`).
  All tokens that a request may need are reserved at its start, so nothing is preempted.
* Only the uncached part of a prompt is computed, at `prefill` tokens/s, one request after the other. During decoding,
  prefill gets the share `prefill_share` of the server, as with chunked prefill.
* Every decoding request gets one token per step, which takes `step + per_request x batch + per_token x tokens held`
  seconds: reading the weights, the batch's own work, reading the cache.
* The cache holds the prefix of all rollouts (always), the prefix of each group, and each rollout's own conversation.
  The least recently used entries are evicted when running requests need the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Defaults: 8 B parameters in 16 bits on one GPU of 141 GB (round figures, not measured)."""

    kv_tokens: int = 680_000
    """100 GB at 147 kB per token (36 layers, 8 key-value heads of 128, 16 bits)."""
    batch: int = 256
    prefill: float = 20_000.0
    prefill_share: float = 0.5
    step: float = 0.010
    per_request: float = 0.00005
    per_token: float = 3.5e-8
    """147 kB at 4.2 TB/s."""


@dataclass(slots=True, eq=False)
class Request:
    rollout: str
    group: str
    common: int
    """Prompt tokens of the prefix that all rollouts share."""
    shared: int
    """Prompt tokens after this prefix that the rollouts of the group share."""
    own: int
    """Prompt tokens after both prefixes: the rollout's own conversation."""
    output: int
    done: asyncio.Future[None]
    to_prefill: float = 0.0
    over: bool = False

    @property
    def held(self) -> int:
        return self.own + self.output


@dataclass(slots=True)
class EngineCount:
    busy: float = 0.0
    """Seconds with at least one request in the batch."""
    batch: float = 0.0
    """Integral of the batch size over time: requests x seconds."""
    prefilling: float = 0.0
    held: float = 0.0
    """Integral over time of the share of the cache (0 to 1) that requests hold."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    waited: float = 0.0
    """Seconds that requests waited for admission."""
    waited_requests: int = 0
    longest_queue: int = 0


@dataclass
class Engine:
    """A modelled engine: `await engine.generate(...)` takes as long as the answer would."""

    model: EngineModel
    loop: asyncio.AbstractEventLoop
    count: EngineCount = field(default_factory=EngineCount)

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[float, Request]] = deque()
        self._prefill: deque[Request] = deque()
        self._decode: list[tuple[float, int, Request]] = []
        self._decoding = 0
        self._numbers = itertools.count()
        self._level = 0.0
        """Number of tokens that a request would have received if it had been decoding since the start."""
        self._held = 0
        self._groups: Counter[str] = Counter()
        self._cached: OrderedDict[str, int] = OrderedDict()
        self._cached_tokens = 0
        self._now = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def in_batch(self) -> int:
        return self._decoding + len(self._prefill)

    @property
    def waiting(self) -> int:
        return sum(not request.over for _, request in self._waiting)

    @property
    def kv_usage(self) -> float:
        return self._held / self.model.kv_tokens

    async def generate(self, rollout: str, group: str, common: int, shared: int, own: int, output: int) -> None:
        request = Request(rollout, group, common, shared, own, output, self.loop.create_future())
        self._catch_up()
        self._waiting.append((self._now, request))
        self._schedule()
        try:
            await request.done
        except asyncio.CancelledError:
            self._catch_up()
            self._abort(request)
            self._schedule()
            raise

    def forget(self, rollout: str) -> None:
        """Drop the rollout's conversation from the cache, because it has ended (it would be evicted later anyway)."""
        self._cached_tokens -= self._cached.pop(rollout, 0)

    # Time

    def _rate(self) -> float:
        """Return tokens per second of each decoding request."""
        if not self._decoding:
            return 0.0
        model = self.model
        seconds = model.step + model.per_request * self._decoding + model.per_token * self._held
        return (1 - model.prefill_share if self._prefill else 1.0) / seconds

    def _prefill_rate(self) -> float:
        return self.model.prefill * (self.model.prefill_share if self._decoding else 1.0)

    def _catch_up(self) -> None:
        """Account for the time since the last event; rates are constant between events."""
        seconds, self._now = self.loop.time() - self._now, self.loop.time()
        if seconds <= 0 or not self.in_batch:
            return
        count = self.count
        count.busy += seconds
        count.batch += seconds * self.in_batch
        count.held += seconds * self.kv_usage
        if self._prefill:
            count.prefilling += seconds
            self._prefill[0].to_prefill -= seconds * self._prefill_rate()
        self._level += seconds * self._rate()

    def _schedule(self) -> None:
        """Advance all requests that can advance, and set a timer for the next event."""
        while self._prefill and self._prefill[0].to_prefill <= 1e-6:
            request = self._prefill.popleft()
            if not request.over:
                self._decoding += 1
                heapq.heappush(self._decode, (self._level + request.output, next(self._numbers), request))
        while self._decode and (self._decode[0][2].over or self._decode[0][0] <= self._level + 1e-6):
            request = heapq.heappop(self._decode)[2]
            if not request.over:
                self._decoding -= 1
                self._end(request)
                request.over = True
                self.count.output_tokens += request.output
                if not request.done.done():
                    request.done.set_result(None)
        while self._waiting and (self._waiting[0][1].over or self._fits(self._waiting[0][1])):
            came, request = self._waiting.popleft()
            if not request.over:
                self._begin(came, request)
        self.count.longest_queue = max(self.count.longest_queue, len(self._waiting))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait = [request.to_prefill / self._prefill_rate() for request in itertools.islice(self._prefill, 1)]
        if self._decode:
            wait.append((self._decode[0][0] - self._level) / self._rate())
        if wait:
            self._timer = self.loop.call_later(max(0.0, min(wait)), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._catch_up()
        self._schedule()

    # Memory

    def _need(self, request: Request) -> int:
        return request.held + (0 if self._groups[request.group] else request.shared)

    def _fits(self, request: Request) -> bool:
        free = self.model.kv_tokens - request.common - self._held
        return not self.in_batch or (self.in_batch < self.model.batch and self._need(request) <= free)

    def _begin(self, came: float, request: Request) -> None:
        count, group = self.count, f"group {request.group}"
        prompt = request.common + request.shared + request.own
        hit = request.common + self._take(request.rollout)
        if self._groups[request.group] or self._take(group):
            hit += request.shared
        self._held += self._need(request)
        self._groups[request.group] += 1
        request.to_prefill = float(max(1, prompt - hit))
        count.prompt_tokens += prompt
        count.computed_tokens += int(request.to_prefill)
        if self._now > came:
            count.waited += self._now - came
            count.waited_requests += 1
        self._prefill.append(request)
        self._evict()

    def _end(self, request: Request) -> None:
        """Release a finished request; its tokens stay cached until the memory is needed."""
        self._release(request)
        self._put(request.rollout, request.held)
        if not self._groups[request.group]:
            self._put(f"group {request.group}", request.shared)
        self._evict()

    def _release(self, request: Request) -> None:
        self._groups[request.group] -= 1
        self._held -= request.held
        if not self._groups[request.group]:
            del self._groups[request.group]
            self._held -= request.shared

    def _abort(self, request: Request) -> None:
        if request.over:
            return
        request.over = True
        if any(request is other for other in self._prefill):
            self._prefill.remove(request)
            self._release(request)
        elif any(request is other for _, _, other in self._decode):
            self._decoding -= 1
            self._release(request)

    def _take(self, key: str) -> int:
        found = self._cached.pop(key, 0)
        self._cached_tokens -= found
        return found

    def _put(self, key: str, tokens: int) -> None:
        self._take(key)
        self._cached[key] = tokens
        self._cached_tokens += tokens

    def _evict(self) -> None:
        while self._cached and self._cached_tokens + self._held > self.model.kv_tokens:
            self._cached_tokens -= self._cached.popitem(last=False)[1]


class Fleet:
    """Several engines with prefix-aware routing.

    A rollout goes to the engine of its group. If this engine has a quarter more rollouts than its share, the rollout
    goes to the engine with the fewest. A rollout stays on its engine.
    """

    def __init__(self, count: int, model: EngineModel, loop: asyncio.AbstractEventLoop) -> None:
        self.engines = [Engine(model, loop) for _ in range(count)]
        self._of: dict[str, int] = {}
        self._active = [0] * count

    @contextlib.contextmanager
    def place(self, group: str) -> Iterator[Engine]:
        """Yield the engine of a rollout, and count the rollout there until the block ends."""
        number = self._of.get(group, -1)
        if number < 0 or self._active[number] > 1.25 * (sum(self._active) + 1) / len(self._active):
            number = self._of[group] = min(range(len(self.engines)), key=self._active.__getitem__)
        self._active[number] += 1
        try:
            yield self.engines[number]
        finally:
            self._active[number] -= 1

    def forget(self, group: str) -> None:
        """Forget a group whose rollouts have all ended."""
        self._of.pop(group, None)
