"""The one interface behind which an inference engine stands.

Promises, each tested by the contract suite in `tests/engines/`:

* `sample` yields `prompt_ids` with its first event, and ids and log-probabilities of equal length with every event.
* The ids of a choice are all that was sampled, the end-of-turn token included, whatever the text shows.
* Closing the iterator (or cancelling the task that reads it) stops the generation.
* A request that the engine cannot serve raises `RequestError` before the first event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, TokenIds


def enforced_format(request: ChatRequest) -> Json | None:
    """The `response_format` to which an engine holds the answer; None where the answer is free.

    It is free while the model may call tools. The API lets it call them first and give the final answer in that form
    later, and a grammar over the whole answer would forbid the calls: Codex sends its `--output-schema` with every
    request of a run. The schema is recorded and the model is not told of it.
    """
    return None if request.tools and request.tool_choice != "none" else request.response_format


def is_constrained(request: EngineRequest) -> bool | None:
    """Whether the answer is sampled under a grammar, and so is not the policy's own; None if nothing asks for it."""
    if not isinstance(request, ChatRequest):
        return None
    if request.tool_choice not in (None, "auto", "none"):
        return True
    return None if request.response_format is None else enforced_format(request) is not None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is; None where it does not say."""

    kv_usage: float | None = None
    """Share of its key-value cache that requests hold, 0 to 1; the mean of its replicas."""
    waiting: int | None = None
    """Requests that wait for a place in a batch."""
    running: int | None = None
    """Requests in the batches."""
    replicas: int = 1


class Engine(ABC):
    """An inference engine with a lifetime: `async with engine:` connects or loads it, and frees it."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """What it is and can do; known once the engine is entered."""

    @property
    def continue_problem(self) -> str | None:
        """Why chats cannot be sampled from exact ids, with the remedy; None where they can (capability `continue`)."""
        return None if "continue" in self.info.capabilities else f"The engine {self.info.engine} cannot do it."

    @abstractmethod
    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        """The token ids of the prompt for this conversation, as the engine's own template makes them.

        `generation=False` leaves out what opens the answer. Raises RequestError where the template refuses.
        """

    @abstractmethod
    def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: TokenIds | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """Generate. Raises RequestError (a bad request), EngineError (the engine failed).

        `prompt` (int32 [n]), for engines that can `continue`: sample from exactly these ids instead of rendering the
        conversation, which then only says how (sampling, tools, how the answer is parsed).
        `stream=False` tells that nobody waits for pieces: the engine may yield the answer in fewer, larger events.
        """

    async def cannot_continue(self, request: ChatRequest, prompt: TokenIds) -> str | None:
        """Why this conversation's answer cannot be sampled from these ids and read as ever; None where it can.

        To be asked before `sample` is given a `prompt`: an engine that can `continue` may still not do it for some
        requests (template options under which its parser was not proved, a prompt that ends in open reasoning).
        """
        return None if "continue" in self.info.capabilities else "The engine does not sample conversations from ids."

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Teacher-forced log-probabilities (nats, raw) of token_ids[1:], each given all that stands before it."""

    async def count_tokens(self, request: ChatRequest) -> int:
        """Length of the rendered prompt in tokens."""
        return len(await self.render(request))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        raise NotImplementedError(f"engine {self.info.engine} cannot decode")

    @abstractmethod
    async def health(self) -> str | None:
        """None when it can serve; else the reason why not."""

    async def load(self) -> EngineLoad | None:
        """How busy it is now; None where it does not say. Raises EngineError where it does not answer."""
        return None

    async def weight_version(self) -> str | None:
        """The policy version now loaded, where the engine knows it."""
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
