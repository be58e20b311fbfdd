"""The types that all packages share: frozen data without behaviour beyond conversions.

Messages follow OpenAI's Chat Completions, because every engine accepts that form and every other dialect can be
translated to it without losing anything that a model reads.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from polar_proxy.provider_calls import ProviderPiece, ProviderRequest

if TYPE_CHECKING:  # importing numpy takes a fifth of the time of a command that reads no tokens
    import numpy as np
    import numpy.typing as npt

Json = dict[str, Any]
TokenIds: TypeAlias = "npt.NDArray[np.int32]"
Logprobs: TypeAlias = "npt.NDArray[np.float32]"

Edge = Literal["root", "continues", "retries", "rewinds", "compacts", "subagent", "side_call"]
CallStatus = Literal["ok", "client_gone", "upstream_error", "no_tokens", "budget"]
"""budget: Polar itself gave the answer, because the session's budget was spent."""
ANSWERED: frozenset[CallStatus] = frozenset({"ok", "no_tokens", "budget"})
"""Statuses of a call with a complete answer."""
FAILED: frozenset[CallStatus] = frozenset({"client_gone", "upstream_error"})
"""Statuses of a call without a complete answer."""
LogprobMode = Literal["raw", "processed"]
RemarkKind = Literal["label", "note", "rating"]
PromptMode = Literal["render", "continue"]
"""render: the engine rendered the messages. continue: the prompt is the exact tokens of the base (the call that this
one extends), followed by the tokens of the new messages."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning"})
"""Types of content parts that are text or reasoning."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
_id_lock = threading.Lock()
_id_last = 0


def new_id(prefix: str) -> str:
    """Return a unique id such as `call_01hv...`. Ids sort by time of creation, strictly within one process."""
    global _id_last
    with _id_lock:
        _id_last = max(time.time_ns() // 1000, _id_last + 1)
        stamp = _id_last
    return encode_id(prefix, (stamp << 40) | secrets.randbits(40))


def encode_id(prefix: str, value: int) -> str:
    """Return the id that encodes a 100-bit number: microseconds since the epoch, followed by 40 random bits."""
    return prefix + "_" + "".join([_PAIRS[value >> shift & 1023] for shift in range(90, -10, -10)])


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model made it. `arguments` is the exact string, not parsed and serialised again."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> Json:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ProviderTurn:
    """A hosted model's signed answer in the provider's own format. Later requests must send it back in this format."""

    provider: str
    """anthropic or google."""
    content: tuple[Json, ...]
    """Content blocks (Anthropic) or parts (Google)."""


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
    cache_control: tuple[tuple[int, Json], ...] = field(default=(), compare=False, repr=False)
    """(index of a content part, the client's mark to cache the prompt up to this part). Only Anthropic's API reads such
    marks."""
    provider_turn: ProviderTurn | None = field(default=None, compare=False, repr=False)
    """The answer in the provider's own format, if a hosted model wrote this message. Not part of `to_openai`."""

    @property
    def has_images(self) -> bool:
        """Whether the content has a part that is neither text nor reasoning, such as an image."""
        return isinstance(self.content, list) and any(part.get("type") not in _TEXT_PARTS for part in self.content)

    @classmethod
    def from_openai(cls, value: Json) -> Message:
        """Return the message described by `value`, which has the form that `to_openai` returns."""
        return cls(
            role=value["role"],
            content=value["content"],
            reasoning=value.get("reasoning_content"),
            tool_calls=tuple(
                ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in value.get("tool_calls", ())
            ),
            tool_call_id=value.get("tool_call_id"),
            name=value.get("name"),
        )

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
    """Sampling parameters. None means the default of the session's policy or of the engine."""

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
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    logprobs: bool = False
    """True if the client asks for log-probabilities (always recorded). The engine then sets `SampleEvent.tokens`."""
    top_logprobs: int = 0
    """Number of alternatives per token that the client requests (`SampleEvent.top`)."""


SAMPLING_FIELDS = tuple(one.name for one in fields(Sampling))
"""Names of the sampling parameters."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of a request other than the conversation and its sampling. Only hosted models know such options."""

    dialect: str
    effort: str | None = None
    """How much to reason: none, minimal, low, medium, high, xhigh or max."""
    thinking_tokens: int | None = None
    """Limit of reasoning tokens; 0 turns reasoning off, -1 leaves it to the model."""
    show_reasoning: bool = False
    """True if the client wants to read the reasoning."""
    fields: Json = field(default_factory=dict)
    """Other fields of the body, by name (`a.b` for a field of an object). They have no effect on open models."""
    betas: tuple[str, ...] = ()
    """The provider's beta features that the client asks for in a header, each as `header: feature`."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to answer, translated from whichever dialect it came in."""

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Json, ...] = ()
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools_cache_control: Json | None = field(default=None, compare=False)
    """The client's mark to cache the prompt up to the end of the tools (see `Message.cache_control`)."""
    options: ClientOptions | None = field(default=None, compare=False)
    large: bool = field(default=False, compare=False)
    """True if the request is so large that work on the whole of it runs in an `OffloadThread`."""
    raw: ProviderRequest | None = field(default=None, compare=False, repr=False)
    """The request as it came, if it is passed on to its provider."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A raw prompt to complete: a text, or exact token ids."""

    model: str
    prompt: str | tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    large: bool = field(default=False, compare=False)
    """True if the request is large (see `ChatRequest.large`)."""
    raw: ProviderRequest | None = field(default=None, compare=False, repr=False)
    """The request as it came, if it is passed on to its provider."""


EngineRequest = ChatRequest | TextRequest


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of tool call number `index` of a choice. `id` and `name` come with the call's first piece."""

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
class Usage:
    """The tokens of one call as the provider counts them. None: the provider does not report this count."""

    input_tokens: int
    """Number of all tokens of the prompt, including those read from the provider's cache or written to it."""
    output_tokens: int
    """Number of all sampled tokens, including those of the reasoning."""
    cached_tokens: int | None = None
    """The part of `input_tokens` that was read from the provider's cache."""
    cache_write_tokens: int | None = None
    """The part of `input_tokens` that was written to the provider's cache."""
    cache_write_1h_tokens: int | None = None
    """The part of `cache_write_tokens` that is kept for an hour, which costs more."""
    reasoning_tokens: int | None = None
    """The part of `output_tokens` that is reasoning."""
    model: str | None = None
    """The model that answered, as the provider names it. The price of the call is that of this model."""
    service_tier: str | None = None
    """The provider's service tier; None for the standard one. Other tiers have other prices."""
    estimated: bool = False
    """True if Polar counted the tokens, because the provider did not report them."""


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """One step of an engine's answer.

    The ids and log-probabilities of all events of one choice, concatenated, are exactly what was sampled, including
    the end-of-turn token. Text may come later than its ids (partial UTF-8, an unfinished tool call), and either may be
    empty. The first event of a call carries `prompt_ids`. The last event of each choice carries its `finish_reason`.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tokens: tuple[str, ...] = ()
    """The text of each of `token_ids`; empty unless the client asked for log-probabilities."""
    top: tuple[tuple[TopLogprob, ...], ...] = ()
    finish_reason: str | None = None
    prompt_ids: Sequence[int] | None = None
    """The ids of the whole prompt, a tuple or a list, in the first event of a call; otherwise None."""
    cached_tokens: int | None = None
    stop_sequence: str | None = None
    """The stop string that ended the choice, if the engine reports it. It comes with the `finish_reason`."""
    weight_version: str | None = None
    """The policy version that sampled these ids, if the engine reports it with every event."""
    versions: tuple[tuple[int, str], ...] = ()
    """Value for `Choice.versions`. Engines that report versions only at the end send it with the `finish_reason`."""
    usage: Usage | None = None
    """Token counts, from engines that report no token ids. The last `usage` of an answer replaces earlier ones."""
    provider_turn: ProviderTurn | None = None
    """The choice in the provider's own format, if the provider signed parts of it. Comes with the `finish_reason`."""
    raw: ProviderPiece | None = None
    """The bytes that the agent gets in place of this event's encoding. Only the passthrough engine sets this."""
    response_id: str | None = None
    response_items: Json | None = None
    """The value for `CallRecord.response_items`. Only the passthrough engine sets this, for the Responses API."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine and its capabilities. Stored once, by hash; each call refers to it."""

    engine: str
    version: str
    model: str
    context_length: int
    template_hash: str | None
    logprob_mode: LogprobMode
    capabilities: frozenset[str]
    """Any of: token_ids, logprobs, tools, json_schema, tool_choice_required, token_prompt, score, images, continue (a
    chat request is sampled from exact ids and its answer parsed as usual), weight_versions (reported per event),
    single_calls (the chat template refuses an answer with two tool calls), hosted (a provider's model, whose own
    sampling defaults hold), signed_answers (the provider wants its signatures back)."""
    eos_token_ids: tuple[int, ...] = ()
    precision: str | None = None
    """Number format of the engine's computations, such as float32 or "bfloat16, fp8 weights"; None if not reported."""
    max_answer: int | None = None
    """Maximum number of tokens of an answer; None if only the context length limits it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer. `token_ids` int32 [n] and `logprobs` float32 [n] include the end-of-turn token."""

    index: int
    message: Message
    finish_reason: str | None
    token_ids: TokenIds
    logprobs: Logprobs
    versions: tuple[tuple[int, str], ...] = ()
    """If the weights changed during sampling: (position, policy version) of the first token that each version sampled.
    Empty if the call's `weight_version` holds for all tokens."""
    reasoning_tokens: int | None = None
    """Number of tokens up to the end of the reasoning, if that is known."""
    provider_turn: ProviderTurn | None = None
    """The answer in its provider's own format, if the provider signed parts of it."""


@dataclass(frozen=True, slots=True)
class ConversationItem:
    """An item of a conversation of the Responses API."""

    item_id: str
    """The id of the item in its conversation. If the client gave none, Polar makes one, which is not part of `item`."""
    item: Json
    """The item as the model reads it: an input item as it was received, or an exact part of an answer."""
    shown: Json | None = None
    """The item as the client got it, if it differs from `item`. Only calls of custom and built-in tools differ."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """The items that a call adds to a stored conversation: its own input and its answer."""

    conversation_id: str
    items: tuple[ConversationItem, ...]


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
    """The request's messages in order, each as the JSON bytes that were received. A raw prompt is one message."""
    tools: bytes | None
    params: Json
    """The request body without messages and tools."""
    sampling: Json
    """The parameters sent to the engine, after the session's policy was applied."""
    prompt_ids: TokenIds | None
    choices: tuple[Choice, ...]
    started_at: float
    first_token_at: float | None
    ended_at: float
    """Seconds since the epoch, as `started_at` and `first_token_at`."""
    cached_tokens: int | None = None
    usage: Usage | None = None
    """The provider's own count; None if the engine reports token ids."""
    price_usd: float | None = None
    """Price of the call in US dollars by the price file (`prices.py`); None if unknown."""
    rule: str | None = None
    """Name of the rule that decided `edge`; None if the edge is `root` because no rule applied."""
    ambiguous: bool = False
    """True if another `edge` or `parent_call_id` was possible as well (see `sessions/lineage_reasons.py`)."""
    thread: str | None = None
    """The thread of the conversation: the harness's own id for it, else the call that began it."""
    fingerprint: Json | None = None
    """The keys by which the call is found again after a restart (`sessions/call_index.py`)."""
    prompt_mode: PromptMode = "render"
    prompt_reason: str | None = None
    """Why the prompt was not continued from the base's tokens (`sessions/continuation.py` lists the reasons)."""
    base_call_id: str | None = None
    """The base: a call whose messages and answer mean the same as this call's first messages, in any `prompt_mode`."""
    base_choice: int | None = None
    provider_conversation: str | None = None
    response_id: str | None = None
    response_items: Json | None = None
    """Id of each item of a passed-through response -> name of the item in this record ("fc_0": the first tool call).
    This field and `response_id` are None in a record that is read back: the store finds calls by these ids instead."""
    deleted_at: float | None = None
    """When the client deleted the response, in seconds since the epoch. The call is kept, and still trained on."""
    engine_name: str | None = None
    """Name of the engine in the settings [engines]; None for the engine of [engine]."""
    route: str | None = None
    """Name of the rule that chose the engine."""
    hooks: Json | None = None
    """Changes by hooks. `request`: the changed parts, as the model saw them. `answer`: the answer before its change."""
    conversation: ConversationTurn | None = None
    """Items that are added to a conversation when the record is committed; None in a record that is read back."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; by the provider's count if there are no ids."""
        if self.usage is not None:
            return self.usage.input_tokens
        return 0 if self.prompt_ids is None else int(self.prompt_ids.size)

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens; by the provider's count if there are no ids."""
        if self.usage is not None:
            return self.usage.output_tokens
        return sum(int(choice.token_ids.size) for choice in self.choices)


SpanKind = Literal["context", "sampled"]


@dataclass(frozen=True, slots=True)
class Span:
    """The origin of consecutive tokens of a trace: tokens [start, end) of a call's prompt (kind `context`), or of the
    call's answer number `choice` (kind `sampled`)."""

    kind: SpanKind
    call_id: str
    start: int
    end: int
    choice: int = 0


class AnswerSampling(NamedTuple):
    """The distribution from which an answer was sampled, and the policy versions of the weights."""

    temperature: float | None
    """Sampling temperature; None if the record does not name it."""
    changes: Json
    """Settings besides temperature that changed the model's own distribution, such as top_p; empty if none did."""
    logprob_mode: LogprobMode
    """`processed`: the log-probabilities are those of the sampled distribution. `raw`: they are those of the model's
    own distribution at temperature 1, without `changes`."""
    versions: tuple[tuple[int, str | None], ...]
    """(start, policy version) of each run of tokens from one version. `start`: position of the run in the answer."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One training sequence.

    `token_ids` int32 [n]; `loss_mask` uint8 [n], 1 on sampled spans only; `logprobs` float32 [n], NaN elsewhere.
    The first `prompt_length` tokens come before the first answer. In order, the spans cover all tokens exactly once.
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
    """Builder `tree`: the trace that this one branches from. This trace has only the tokens after the branch."""
    branch_at: int = 0
    """Builder `tree`: number of tokens before the branch, counted from the root trace."""
    rescored: bool = False
    """True if `logprobs` come from a later, teacher-forced scoring, not from sampling."""
    sampling: tuple[AnswerSampling, ...] = ()
    """How the answers were sampled: one entry for each sampled span, in order."""

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.loss_mask.sum())
