"""Response bodies that describe recorded sessions, calls and rollouts in full. `polar show` prints them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from polar_proxy.api_models.feedback import Remark, Reward, RolloutDetail
from polar_proxy.api_models.responses import ApiKey, ApiResponseModel


class SessionFields(ApiResponseModel):
    """Fields of a session in lists and in its full record."""

    session_id: str
    """The id of the session."""
    label: str | None
    """The name given to the session. A session that was opened by a request with an unknown key is named after this key
    if the key is made of plain words, such as `my-agent-2`."""
    origin: str
    """How the session was created: key (`polar session new`), open (a request with an unknown key, at a gateway that
    listens on loopback), rollout (for a rollout) or user (for the model that plays the user in a dialogue)."""
    rollout_id: str | None
    """Id of the rollout whose calls the session records."""
    created_at: float
    """When the session was created."""
    closed_at: float | None
    """When the session was closed; null while it is open."""
    incomplete: str | None
    """`unrecorded_calls` if some calls were answered but not recorded: the session must then not be trained on. Null
    if all calls are recorded."""
    spent: str | None
    """Name of the budget limit that the session reached, such as max_calls; null if it reached none."""
    failed_calls: int
    """Number of calls that failed: their status is `client_gone` or `upstream_error`."""
    prompt_tokens: int
    """Sum of prompt tokens over all calls. For hosted calls, the provider's counts are used."""
    completion_tokens: int
    """Sum of sampled tokens over all calls."""
    price_usd: float | None
    """Sum, in US dollars, of the known prices of the session's calls; null if no price is known."""
    last_call_at: float | None
    """When the last call ended."""
    reward: float | None = None
    """The newest reward of the session as a whole; null if it has none. The session of a rollout has none, because
    rewards are then given to the rollout."""


class Session(SessionFields):
    """A session, without its calls."""

    calls: int
    """Number of recorded calls."""


class SessionList(ApiResponseModel):
    """A page of sessions."""

    sessions: list[Session]
    """The sessions, newest first. For the next page, pass the id of the last one as `before`."""


class StoryToolCall(ApiResponseModel):
    """A tool call of an answer, shortened."""

    name: str
    """The name of the tool."""
    arguments: str
    """The arguments as the model wrote them. The middle of a long text is left out."""
    left_out: int = 0
    """Number of characters that were left out."""


class StoryMessage(ApiResponseModel):
    """A message of a conversation, shortened."""

    role: str
    """The role: system, user, assistant, tool, ...; `prompt` for a plain prompt; `raw` if the request cannot be
    parsed."""
    text: str
    """The text. Images and files appear as their type; the middle of a long text is left out."""
    left_out: int = 0
    """Number of characters that were left out."""
    reasoning: str | None = None
    """The reasoning of an answer."""
    tool: str | None = None
    """Name of the tool, if the message is a tool result."""
    tool_calls: list[StoryToolCall] = Field([])
    """The tool calls of an answer."""


class CallChoice(ApiResponseModel):
    """One answer of a call."""

    index: int
    """Position among the call's answers, from 0."""
    message: dict[str, Any]
    """The answer in OpenAI's format."""
    finish_reason: str | None
    """Why the answer ended, such as stop, length or tool_calls."""
    token_ids: list[int]
    """The sampled token ids, with the end-of-turn token."""
    logprobs: list[float | None]
    """The log-probability of each token in nats; null if the engine did not report it."""
    token_texts: list[str] | None = None
    """The text of each token; null if texts were not requested or the tokens cannot be decoded. The text of a hosted
    answer is split into tokens by tiktoken."""


class CallFields(ApiResponseModel):
    """Fields of a call in its session and in its full record."""

    call_id: str
    """The id of the call."""
    dialect: str
    """The wire format of the request."""
    path: str
    """The route of the request."""
    model: str
    """The model that the agent named."""
    status: str
    """`ok`; `client_gone`: the agent disconnected; `upstream_error`: the engine failed; `no_tokens`: answered
    without token ids; `budget`: answered by Polar, because the session's budget is spent."""
    http_status: int
    """HTTP status of the answer."""
    error: str | None
    """Why the call failed."""
    edge: str
    """How the call relates to an earlier call: root, continues, retries, rewinds, compacts, subagent or side_call."""
    parent_call_id: str | None
    """Id of the earlier call that the relation `edge` refers to; null if there is no such call."""
    rule: str | None = None
    """Name of the rule that decided the edge."""
    reason: str | None = None
    """Why the rule decided for the relation `edge`, in words."""
    ambiguous: bool = False
    """True if another edge or parent was possible as well."""
    cached_tokens: int | None
    """Number of prompt tokens that the engine had in its cache."""
    price_usd: float | None
    """Price of a hosted call in US dollars; null if it is unknown."""
    weight_version: str | None
    """Policy version of the weights that sampled the answers."""
    started_at: float
    """When the request arrived."""
    first_token_at: float | None
    """When the first token arrived."""
    ended_at: float
    """When the answer ended."""


class SessionCall(CallFields):
    """A call of a session, with the messages that it adds to the conversation of an earlier call."""

    prompt_mode: str | None = None
    """continue: the prompt begins with the exact tokens of the call that this call extends; render: the engine rendered
    the prompt."""
    prompt_reason: str | None = None
    """Why the prompt does not continue the tokens of an earlier call."""
    message_count: int
    """Number of messages in the request."""
    choices: int
    """Number of answers."""
    finish_reason: str | None
    """The finish reason of the first answer."""
    prompt_tokens: int | None
    """Number of prompt tokens; null if the engine returned no token ids."""
    completion_tokens: int
    """Number of sampled tokens."""
    input_tokens: int | None
    """Number of prompt tokens of a hosted call as the provider counts them."""
    output_tokens: int | None
    """Number of sampled tokens of a hosted call as the provider counts them."""
    new_messages: list[StoryMessage] = Field([])
    """The messages of the request that are new: neither the request nor the answer of the call `parent_call_id` has
    them."""
    answer: StoryMessage | None = None
    """The first answer."""
    answers: list[CallChoice] = Field([])
    """All answers with their tokens; empty if tokens were not requested."""


class SessionTrace(ApiResponseModel):
    """A training sequence of a session."""

    trace_id: str
    """The id of the trace."""
    builder: str
    """Name of the builder that made the trace."""
    grade: str
    """How far the trace can be trusted: exact, continued, approximate or rejected."""
    tokens: int
    """Number of tokens."""
    trained_tokens: int
    """Number of tokens with loss mask 1."""
    calls: list[str]
    """Ids of the calls whose answers the trace contains."""
    reward: float | None
    """The reward of the trace."""


class SessionDetail(SessionFields):
    """A session with its calls and traces."""

    calls: list[SessionCall]
    """The calls, ordered by start."""
    note: str | None
    """A warning that the sampling parameters make the log-probabilities inexact for training, and how to avoid this.
    Null if no call needs the warning."""
    traces: list[SessionTrace]
    """The stored traces of the builder `merged`."""
    excluded: dict[str, str]
    """Calls that are in no trace, each with the reason."""
    rewards: list[Reward]
    """All rewards ever given to the session, oldest first."""
    remarks: list[Remark] = Field([])
    """All labels, notes and ratings, oldest first."""
    texts_problem: str | None = None
    """Why some tokens have no texts although texts were requested."""


class CallUsage(ApiResponseModel):
    """Token counts of a hosted call, as the provider reports them. A count that is not reported is null."""

    input_tokens: int
    """Number of all prompt tokens, including tokens read from the provider's cache or written to it."""
    output_tokens: int
    """Number of all sampled tokens, including those of the reasoning."""
    cached_tokens: int | None
    """Number of prompt tokens read from the provider's cache."""
    cache_write_tokens: int | None
    """Number of prompt tokens written to the provider's cache."""
    cache_write_1h_tokens: int | None
    """Number of prompt tokens written to the provider's cache for one hour; `cache_write_tokens` includes them."""
    reasoning_tokens: int | None
    """Number of sampled tokens of the reasoning."""
    model: str | None
    """The model that answered, as the provider names it."""
    service_tier: str | None
    """The provider's service tier; null for the standard one."""
    estimated: bool
    """True if Polar counted the tokens, because the provider did not report them."""


class CallDetail(CallFields):
    """A call with its conversation and tokens."""

    session_id: str
    """Id of the session."""
    stream: bool
    """True if the agent asked for a stream."""
    engine: dict[str, Any] | None
    """Description of the engine that sampled the answers."""
    logprob_mode: str
    """The distribution that the log-probabilities belong to. `processed`: the distribution that was sampled from;
    `raw`: the model's own distribution at temperature 1."""
    engine_name: str | None
    """Name of the engine in the settings [engines]; null for the engine of [engine]."""
    route: str | None
    """The rule that chose the engine."""
    hooks: dict[str, Any] | None
    """Changes by hooks; null if hooks changed nothing. `request`: the changed parts of the request, as the model saw
    them. `answer`: the answers as the model sampled them, if hooks changed an answer."""
    params: dict[str, Any]
    """The request body without messages and tools."""
    sampling: dict[str, Any]
    """The parameters that were sent to the engine."""
    usage: CallUsage | None
    """The provider's token counts; null if the engine reports token ids."""
    messages: list[Any]
    """The messages in the agent's own format."""
    tools: Any
    """The tools in the agent's own format."""
    conversation: dict[str, Any]
    """Messages and tools in OpenAI's format."""
    prompt_ids: list[int] | None
    """The token ids of the prompt; null if the engine returned none."""
    choices: list[CallChoice]
    """The answers with their tokens."""
    texts_problem: str | None = None
    """Why the tokens have no texts although texts were requested."""


class RolloutEvent(ApiResponseModel):
    """An event of a rollout."""

    event_id: int
    """Number of the event; later events have higher numbers."""
    at: float
    """When the event happened."""
    kind: str
    """The kind of event, such as `status`."""
    data: dict[str, Any]
    """Details of the event; the fields depend on `kind`."""


class Artifact(ApiResponseModel):
    """A stored file of a rollout."""

    artifact_id: str
    """The id of the artifact."""
    name: str
    """Name of the file, such as `patch.diff`."""
    sha256: str
    """SHA-256 of the file's content."""
    bytes: int
    """Size of the file in bytes."""
    created_at: float
    """When the file was stored."""
    path: str
    """The file on the server's machine."""


class RolloutRecord(RolloutDetail):
    """A rollout with everything that was recorded of it."""

    instruction: str | None
    """The task's instruction to the agent."""
    config: dict[str, Any]
    """The options of the rollout."""
    events: list[RolloutEvent]
    """The rollout's events, oldest first."""
    artifacts: list[Artifact]
    """The rollout's stored files."""
    session: SessionDetail | None
    """The session of the rollout's last attempt."""


class Record(ApiResponseModel):
    """The record that a name refers to: exactly one of the fields is set."""

    rollout: RolloutRecord | None = None
    """The rollout, if the requested name is that of a rollout; otherwise null."""
    session: SessionDetail | None = None
    """The session, if the requested name is that of a session; otherwise null."""
    call: CallDetail | None = None
    """The call, if the requested name is that of a call; otherwise null."""


class CreatedKey(ApiKey):
    """A new key of the HTTP API."""

    key: str
    """The key. It is shown once; only its hash is stored."""


class KeyList(ApiResponseModel):
    """All keys of the HTTP API."""

    keys: list[ApiKey]
    """The keys, including revoked ones, oldest first."""


class ExportSummary(ApiResponseModel):
    """Counts of the data that an export selected, wrote and left out."""

    rows: int
    """Number of rows that were written."""
    rollouts: int
    """Number of rollouts that were selected."""
    sessions: int
    """Number of selected sessions that belong to no rollout."""
    left_out: dict[str, int]
    """Number of calls, traces and rows that were left out, by reason. A row is left out if a trainer's
    format refuses it."""
    reasons: list[str] = Field(default_factory=list)
    """Why there are no rows, in words; empty if there are rows."""
