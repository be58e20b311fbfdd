"""The shared nouns of Polar: plain frozen data, no behaviour beyond conversions, no imports from the house.

Messages follow the OpenAI Chat Completions form, because every engine speaks it and every other dialect can be
translated to it without loss of what a model reads.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Json = dict[str, Any]
TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]

Edge = Literal["root", "continues", "retries", "rewinds", "compacts", "subagent", "side_call"]
CallStatus = Literal["ok", "client_gone", "upstream_error", "no_tokens"]
LogprobMode = Literal["raw", "processed"]
PromptMode = Literal["render", "continue"]
"""observe: the engine rendered the prompt; continue: Polar gave it the earlier call's exact tokens and what is new."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_id_lock = threading.Lock()
_id_last = 0


def new_id(prefix: str) -> str:
    """A unique id such as `call_01hv...`: sorts by time of creation (strictly, within one process)."""
    global _id_last
    with _id_lock:
        _id_last = max(time.time_ns() // 1000, _id_last + 1)
        stamp = _id_last
    value = (stamp << 40) | secrets.randbits(40)
    return prefix + "_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(95, -5, -5))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model made it; `arguments` is the exact string, not parsed and printed again."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> Json:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `content` is a string, a list of OpenAI content parts (text, image_url, ...) kept as they came, or None.
    """

    role: str
    content: str | list[Json] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def to_openai(self) -> Json:
        out: Json = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. None means: the engine's (or the session policy's) default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    logprobs: bool = False
    """The client wants to see log-probabilities: events then carry `tokens`. They are recorded in any case."""
    top_logprobs: int = 0
    """How many alternatives per token the client wants to see (`SampleEvent.top`)."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to answer, whatever dialect it came in."""

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Json, ...] = ()
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A raw prompt to continue: text, or exactly these token ids."""

    model: str
    prompt: str | tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)


EngineRequest = ChatRequest | TextRequest


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of the `index`-th tool call of a choice; `id` and `name` come with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """One step of an engine's answer.

    The ids and log-probabilities of all events of one choice, put in a row, are exactly what was sampled (with the
    end-of-turn token). Text may lag behind the ids (partial UTF-8, a tool call being held back) and either may be
    empty. The first event of a call carries `prompt_ids`; the last of each choice carries `finish_reason`.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tokens: tuple[str, ...] = ()
    """Text of each token of `token_ids`; filled only when the client asked for log-probabilities."""
    top: tuple[tuple[TopLogprob, ...], ...] = ()
    finish_reason: str | None = None
    prompt_ids: Sequence[int] | None = None
    """A tuple or a list; read only."""
    cached_tokens: int | None = None
    stop_sequence: str | None = None
    """The stop string at which the choice ended, told with its `finish_reason`, where the engine knows which it was."""
    weight_version: str | None = None
    """The policy version that sampled these ids, where the engine tells it for every event."""
    versions: tuple[tuple[int, str], ...] = ()
    """As `Choice.versions`, told with the `finish_reason` where the engine knows the versions only then."""
    usage: tuple[int, int] | None = None
    """(prompt, answers) in tokens, as an engine counted them that tells no ids; with its last event."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and what it can do; stored once by its hash and referred to by each call."""

    engine: str
    version: str
    model: str
    context_length: int
    template_hash: str | None
    logprob_mode: LogprobMode
    capabilities: frozenset[str]
    """Of: token_ids, logprobs, tools, json_schema, tool_choice_required, token_prompt, score, images, continue (a chat
    request is sampled from exact ids and its answer parsed as ever), weight_versions (told for every event)."""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer. `token_ids` int32 [n] and `logprobs` float32 [n] belong together, end-of-turn included."""

    index: int
    message: Json
    finish_reason: str | None
    token_ids: TokenIds
    logprobs: Logprobs
    versions: tuple[tuple[int, str], ...] = ()
    """(first position, policy version) of each run of tokens, where the weights changed while it was sampled; empty:
    the call's `weight_version` holds for all of it."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One model request and its answer, as it is committed."""

    call_id: str
    session_id: str
    dialect: str
    path: str
    stream: bool
    model: str
    engine: EngineInfo | None
    weight_version: str | None
    logprob_mode: LogprobMode
    status: CallStatus
    http_status: int
    error: str | None
    edge: Edge
    parent_call_id: str | None
    messages: tuple[bytes, ...]
    """The request's messages in order, each as the JSON bytes that came (a raw prompt is one of them)."""
    tools: bytes | None
    params: Json
    """The rest of the request body."""
    sampling: Json
    """What was really sent to the engine, after the session's policy."""
    prompt_ids: TokenIds | None
    choices: tuple[Choice, ...]
    started_at: float
    first_token_at: float | None
    ended_at: float
    """Seconds since the epoch."""
    cached_tokens: int | None = None
    rule: str | None = None
    """Name of the rule of history that gave it its edge; None for a root that no rule speaks of."""
    ambiguous: bool = False
    """Another edge or parent was possible as well; `rule` says why."""
    thread: str | None = None
    """The line of conversation: the harness's own id of it, else the call that began it."""
    fingerprint: Json | None = None
    """By which history knows the call again after a restart."""
    prompt_mode: PromptMode = "render"
    prompt_reason: str | None = None
    """Why the prompt was not continued from the base's tokens (`history/continuation.py` lists the reasons); None where
    it was, or where nobody asked."""
    base_call_id: str | None = None
    """The answered call whose conversation this one extends by meaning, in either mode; None: it extends none."""
    base_choice: int | None = None


@dataclass(frozen=True, slots=True)
class StoredLineage:
    """Where a call stands in its session, and the fingerprint by which history knows it again."""

    call_id: str
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    thread: str | None
    status: CallStatus
    ended_at: float
    fingerprint: Json | None


SpanKind = Literal["context", "sampled"]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a run of a trace's tokens came from: [start, end) of the prompt or of choice `choice` of a call."""

    kind: SpanKind
    call_id: str
    start: int
    end: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """One training sequence.

    `token_ids` int32 [n]; `loss_mask` uint8 [n], 1 exactly on sampled spans; `logprobs` float32 [n], NaN off the mask.
    The first `prompt_length` tokens are the first call's prompt. Spans tile [0, n) in order.
    """

    trace_id: str
    session_id: str
    rollout_id: str | None
    builder: str
    index: int
    prompt_length: int
    token_ids: TokenIds
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Logprobs
    spans: tuple[Span, ...]
    call_ids: tuple[str, ...]
    reward: float | None = None
    grade: str = "exact"
    parent_trace_id: str | None = None
    """Builder `tree`: the trace that this one branches from; its own tokens stand behind the parent's first ones."""
    branch_at: int = 0
    """How many tokens of the parent's whole path (its own parents included) come before this trace's own."""
    rescored: bool = False
    """`logprobs` are an engine's later, teacher-forced ones, not those told at sampling."""
