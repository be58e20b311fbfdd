"""The interface of an inference engine: render a conversation, sample an answer, score a token sequence.

Promises, each checked by the contract suite in `tests/engines/engine_contract.py`:

* The first event of `sample` carries `prompt_ids`; every event carries as many log-probabilities as token ids.
* The ids of a choice include every sampled token, also the end-of-turn token and tokens that the text does not show.
* Closing the iterator, or cancelling the task that reads it, stops the generation.
* A request that the engine cannot serve raises `RequestError` before the first event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, TokenIds

GREEDY_BELOW = 1e-5
"""If the temperature is below this value, the most likely token is taken, as in vLLM."""


class CannotContinueError(RequestError):
    """The engine cannot sample this conversation from exact token ids. `reason` says why, with the remedy if known."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This engine cannot continue from exact tokens: {reason}", code="cannot_continue")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ExactPrompt:
    """Prompt ids (int32 [n]) that an engine has accepted for one call; made by `Engine.accept_prompt`."""

    token_ids: TokenIds

    @property
    def constrained(self) -> bool:
        """Whether the engine used a grammar for which the request did not ask. Known once sampling has begun."""
        return False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is. A field is None if the engine does not report it."""

    kv_usage: float | None = None
    """Share of the key-value cache that running requests occupy, 0 to 1; the mean over replicas."""
    waiting: int | None = None
    """Number of requests that wait to be added to a batch."""
    running: int | None = None
    """Number of requests whose answers are being sampled."""
    replicas: int = 1


class Engine(ABC):
    """An inference engine. `async with engine:` connects to it or loads it, and releases it at the end."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """Identity and capabilities of the engine. Available once the engine is entered."""

    @property
    def continue_problem(self) -> str | None:
        """The reason why this engine cannot sample conversations from exact ids, with the remedy; None if it can."""
        return (
            None
            if "continue" in self.info.capabilities
            else f"The engine {self.info.engine} cannot sample a conversation from exact ids."
        )

    @abstractmethod
    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        """Render the conversation with the engine's own chat template, and return the token ids of the prompt.

        `generation=False` leaves out the tokens that open the answer. Raises RequestError if the template refuses the
        conversation.
        """

    async def accept_prompt(self, request: ChatRequest, token_ids: TokenIds) -> ExactPrompt:
        """Check that the answer to `request` can be sampled from exactly `token_ids` and parsed like any other answer.

        Raises CannotContinueError if not. An engine with the capability `continue` may still refuse single requests,
        for example with template options for which its answer parser was not verified.
        """
        if "continue" not in self.info.capabilities:
            raise CannotContinueError(f"the engine {self.info.engine} cannot sample a conversation from exact ids.")
        return ExactPrompt(token_ids)

    def not_carried(self, request: EngineRequest) -> tuple[str, ...]:
        """Return the names of the request's options that the engine does not send to its provider.

        The call's record lists these names.
        """
        return ()

    async def constrains(self, request: EngineRequest) -> bool:
        """Return whether the engine constrains the answer by a grammar for which the request did not ask.

        This holds only if the engine renders the request. For exact prompts, use `ExactPrompt.constrained`.
        """
        return False

    @abstractmethod
    def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """Generate an answer. Raises RequestError for a bad request and EngineError if the engine fails.

        With `prompt` the engine samples from exactly its ids instead of rendering the conversation. `request` then
        sets only the sampling parameters and how the answer is parsed. `stream=False` means that the client wants the
        answer in one piece, so the engine may yield it in fewer, larger events.
        """

    @abstractmethod
    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return teacher-forced log-probabilities (nats) of token_ids[1:], each given all tokens before it.

        The distribution is softmax(logits / temperature). NaN marks a value that the engine does not know.
        """

    async def render_texts(self, requests: Sequence[ChatRequest], *, generation: bool = True) -> list[str]:
        """Return the renderings of conversations as text, special tokens included (see `render`)."""
        return [await self.decode(await self.render(request, generation=generation)) for request in requests]

    async def confirm_rendering(self, request: ChatRequest, end: Sequence[int]) -> bool:
        """Return whether the engine's rendering of a request ends with the token ids `end`.

        An engine that renders in this process ignores `end`, and returns whether this process and the server render
        the request equally. To save time, it compares only some requests, and otherwise returns an earlier result.
        """
        rendered = await self.render(request)
        return rendered[max(0, len(rendered) - len(end)) :] == list(end)

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of rendered text."""
        raise NotImplementedError(f"engine {self.info.engine} cannot encode text")

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the rendered prompt in tokens."""
        return len(await self.render(request))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        raise NotImplementedError(f"engine {self.info.engine} cannot decode token ids")

    @abstractmethod
    async def health(self) -> str | None:
        """Return None if the engine can serve, else the reason why it cannot."""

    async def load(self) -> EngineLoad | None:
        """Return how busy the engine is; None if it never reports this. Raises EngineError if it does not respond."""
        return None

    async def weight_version(self) -> str | None:
        """Return the policy version of the loaded weights; None if the engine does not know it."""
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def uses_tools(request: ChatRequest) -> bool:
    """Return whether the model may call tools: the request has tools and its `tool_choice` is not `none`."""
    return bool(request.tools) and request.tool_choice != "none"


def enforced_format(request: ChatRequest) -> Json | None:
    """Return the `response_format` that constrains the answer; None if the answer is free.

    While the model may call tools, the answer is free, and the format is recorded but not enforced. In the API, the
    model may call tools first and give only its final answer in the format. (Codex sends its `--output-schema` with
    every request of a run.) A grammar over the whole answer would forbid the tool calls.
    """
    return None if uses_tools(request) else request.response_format


def is_constrained(request: EngineRequest, info: EngineInfo) -> bool | None:
    """Return whether this engine constrains the answer by a grammar, so that it is not a free sample of the policy.

    None if the request demands neither a response format nor a tool call. False if the request demands a format or a
    tool call, but the engine does not enforce it.
    """
    if not isinstance(request, ChatRequest) or not (_demands_call(request) or request.response_format is not None):
        return None
    if _demands_call(request) and "tool_choice_required" in info.capabilities:
        return True
    return enforced_format(request) is not None and "json_schema" in info.capabilities


def _demands_call(request: ChatRequest) -> bool:
    return request.tool_choice not in (None, "auto", "none")
