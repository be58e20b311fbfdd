"""The tables of the newest schema revision. `migrations/` creates them; a test compares the two.

Times are seconds since the epoch (double precision). Ids are text that sorts by time of creation. Hashes have 16 bytes
(hashes of keys: 32). JSON columns hold JSON text, which the JSON functions of SQLite and PostgreSQL read. Binary cells
are packed as `cells` describes.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    text,
)
from sqlalchemy.engine import Dialect

from polar_proxy.store import json_codec
from polar_proxy.store.encoding.packed_json import pack_small_json, unpack_small_json

RolloutStatus = Literal[
    "queued", "preparing", "ready", "running", "scoring", "done", "failed", "cancelled", "timed_out"
]
ROLLOUT_STATUSES: frozenset[str] = frozenset(get_args(RolloutStatus))
FINAL_STATUSES: frozenset[str] = frozenset({"done", "failed", "cancelled", "timed_out"})

VERSION_TABLE = "polar_schema"
"""The table with the schema revision. A database without it is not a Polar database."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

_serial = BigInteger().with_variant(Integer, "sqlite")


class PackedJson(TypeDecorator[Any]):
    """JSON that only Polar reads, packed to about a third of its text."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else pack_small_json(json_codec.dumps(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json_codec.loads(unpack_small_json(value))


def _json(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, JSON(none_as_null=True), nullable=nullable)


def _counter(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default="0")


tasks = Table(
    "tasks",
    metadata,
    Column("task_id", Text, primary_key=True),
    Column("family", Text, nullable=False),
    Column("seed", BigInteger),
    Column("instruction", Text, nullable=False),
    _json("spec"),
    Column("created_at", Double, nullable=False),
)

jobs = Table(
    "jobs",  # groups of rollouts that were submitted together
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("idempotency_key", Text, unique=True),
    Column("label", Text),
    _json("spec"),
    Column("priority", Integer, nullable=False),
    Column("status", Text, nullable=False, index=True),  # open, paused, done, cancelled
    Column("error", Text),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("paused_until", Double),  # end of a pause; null: paused until it is resumed
    Column("callback_url", Text),  # is notified when one of its groups or the job ends
)

groups = Table(
    "groups",
    metadata,
    Column("group_id", Text, primary_key=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False, index=True),
    Column("rollout_count", Integer, nullable=False),  # rollouts that were queued
    _json("config"),
    Column("created_at", Double, nullable=False),
    Column("job_id", Text, index=True),
    Column("group_size", Integer, nullable=False),  # rollouts that complete the group
    Column("status", Text, nullable=False, server_default="open"),  # open, finished, cancelled
    Column("reason", Text),  # why the group was stopped early or dropped
    Column("ended_at", Double),
    Column("delivery", Text, index=True),  # open, waiting, leased, delivered, dropped; null: not for training
    Column("max_staleness", Integer),  # largest staleness in policy versions; null: no limit
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("key_hash", LargeBinary, unique=True),  # SHA-256 of the key, which is never stored
    Column("label", Text),
    Column("origin", Text, nullable=False),  # key, open, rollout
    # No foreign key: rollouts.session_id refers to this table, and a circle of keys could not be inserted.
    Column("rollout_id", Text, index=True),
    _json("policy", nullable=True),
    Column("created_at", Double, nullable=False),
    Column("closed_at", Double),
    Column("incomplete", Text),  # machine-readable reason why it must not be trained on; null: all calls are recorded
    # Updated in the transaction that adds the calls, so that listings need not count calls.
    _counter("calls"),
    _counter("failed_calls"),
    _counter("prompt_tokens"),
    _counter("completion_tokens"),
    Column("last_call_at", Double),
    Column("reward", Double),  # the newest reward of a session without a rollout; all rewards are in `rewards`
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", Text, primary_key=True),
    Column("group_id", Text, ForeignKey("groups.group_id"), nullable=False, index=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False, index=True),
    Column("group_index", Integer, nullable=False),
    Column("session_id", Text, ForeignKey("sessions.session_id"), index=True),
    Column("status", Text, nullable=False, index=True),
    Column("incomplete", Boolean, nullable=False, server_default="0"),  # a call was lost, so it is never trained on
    Column("reward", Double),  # the newest reward of the rollout; all rewards are in `rewards`
    Column("exit_code", Integer),
    Column("error", Text),
    Column("harness", Text, nullable=False),
    Column("sandbox", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("seed", BigInteger),
    _json("config"),
    Column("owner_host", Text),  # the process that runs it, so that a restart finds interrupted rollouts
    Column("owner_pid", BigInteger),
    Column("job_id", Text, index=True),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("cause", Text),  # machine-readable cause of the failure or of the last retry
    Column("masked", Boolean, nullable=False, server_default="0"),  # counts in the baseline, but is not trained on
    Column("claimed_by", Text, index=True),  # the worker; without a heartbeat it loses the claim at `lease_expires_at`
    Column("lease_expires_at", Double),
    Column("policy_version", Text),  # when the rollout was claimed
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),  # when the agent started
    Column("ended_at", Double),  # when it reached a final status
)

rollout_is_final = rollouts.c.status.in_(sorted(FINAL_STATUSES))
"""SQL condition: the rollout has a final status."""

stages = Table(
    "stages",
    metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("stage", Text, primary_key=True),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", Text),
    Column("cause", Text),
    Column("worker", Text),
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", Text, primary_key=True),
    Column("group_id", Text, ForeignKey("groups.group_id"), nullable=False),
    Column("consumer", Text, nullable=False),
    Column("policy_version", Text),  # of the trainer when it took the lease
    Column("leased_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", Text),  # acknowledged, returned, expired
)

OPEN_LEASE = text("ended_at IS NULL")
open_leases = Index("uq_leases_group_id_open", leases.c.group_id, unique=True, sqlite_where=OPEN_LEASE)
"""A group has at most one open lease, also when two servers write at the same time.

The migration adds `postgresql_where`: SQLAlchemy imports PostgreSQL's dialect as soon as that is named."""

callbacks = Table(
    "callbacks",  # requests to the callback URLs of jobs, sent and to be sent
    metadata,
    Column("callback_id", Text, primary_key=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("kind", Text, nullable=False),  # group.finished, group.cancelled, job.ended
    Column("body", Text),  # fixed at the first attempt; null: not attempted yet
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("next_attempt_at", Double, index=True),  # null: delivered, or given up
    Column("delivered_at", Double),
    Column("error", Text),  # error of the last attempt
)

job_events = Table(
    "job_events",  # status changes of jobs and groups; those of rollouts are in `rollout_events`
    metadata,
    Column("job_event_id", _serial, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),  # job, group, feed
    _json("data"),
)

api_keys = Table(
    "api_keys",  # keys of the HTTP API; agents use the keys of their sessions
    metadata,
    Column("key_hash", LargeBinary, primary_key=True),  # SHA-256 of the key, which is never stored
    Column("role", Text, nullable=False),  # admin, trainer
    Column("label", Text),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)

open_calls = Table(
    "open_calls",  # announced calls, if several gateways share the database; the commit of a call deletes its row
    metadata,
    Column("call_id", Text, primary_key=True),
    # No foreign key: a row may outlive its session for a moment and must not prevent pruning.
    Column("session_id", Text, nullable=False, index=True),
    Column("gateway", Text, nullable=False, index=True),  # HOST:PID:..., renews `lease_expires_at` while it runs
    Column("started_at", Double, nullable=False),
    Column("lease_expires_at", Double, nullable=False),  # after this time the call counts as lost
)

fleet = Table(
    "fleet",  # one row: whether all servers on this database are paused; read by every claim
    metadata,
    Column("fleet_id", Integer, primary_key=True, autoincrement=False),  # 1
    Column("paused_at", Double),  # null: not paused
    Column("paused_until", Double),  # end of the pause; null: paused until it is resumed
)

nodes = Table(
    "nodes",  # messages, lists of tools and parts of prompts, each stored once; `parent_id`: the one before it
    metadata,
    Column("node_id", LargeBinary, primary_key=True),
    Column("parent_id", LargeBinary, ForeignKey("nodes.node_id")),
    Column("kind", Text, nullable=False),  # message, tools, tokens
    Column("length", Integer, nullable=False),  # tokens (kind tokens) or bytes of this node
    Column("chain_length", BigInteger, nullable=False),  # length of this node and all its ancestors
    Column("data", LargeBinary, nullable=False),
)

engines = Table(
    "engines",
    metadata,
    Column("engine_hash", LargeBinary, primary_key=True),
    Column("engine", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("model", Text, nullable=False),
    _json("info"),
)

settings = Table(
    "settings",
    metadata,
    Column("settings_hash", LargeBinary, primary_key=True),
    _json("value"),
)

calls = Table(
    "calls",
    metadata,
    Column("call_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    Column("dialect", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("model", Text, nullable=False),
    Column("engine_hash", LargeBinary, ForeignKey("engines.engine_hash")),
    Column("weight_version", Text),
    Column("logprob_mode", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("http_status", Integer, nullable=False),
    Column("error", Text),
    Column("edge", Text, nullable=False),
    # No foreign key: a call may be committed before the one it continues.
    Column("parent_call_id", Text),
    Column("rule", Text),  # the lineage rule that decided the edge
    Column("ambiguous", Boolean, nullable=False),
    Column("thread", Text),
    Column("fingerprint", PackedJson),  # for recognising the conversation after a restart
    Column("prompt_mode", Text, nullable=False),  # render (by the engine), continue (tokens of the base)
    Column("prompt_reason", Text),  # why it does not continue the tokens of the base
    Column("base_call_id", Text),  # the base: the answered call whose conversation this call extends
    Column("base_choice", Integer),
    Column("message_count", Integer, nullable=False),
    Column("messages_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("tools_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("params_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("sampling_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("prompt_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("prompt_tail", LargeBinary),  # packed ids after the chain of `prompt_node`
    Column("prompt_tokens", Integer),  # null: the engine returned no ids
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer),
    Column("started_at", Double, nullable=False),
    Column("first_token_at", Double),
    Column("ended_at", Double, nullable=False),
    Column("deleted_at", Double),  # when its client deleted the response; the call stays, and is trained on
    Index(None, "session_id", "started_at", "call_id"),
)

completions = Table(
    "completions",
    metadata,
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("choice_index", Integer, primary_key=True, autoincrement=False),
    Column("finish_reason", Text),
    Column("tokens", Integer, nullable=False),
    Column("message", LargeBinary, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("reasoning_tokens", Integer),  # tokens up to the end of the reasoning; null: none, or not known
    _json("versions", nullable=True),  # [[first position, policy version], ...] if the version changed
)

conversations = Table(
    "conversations",  # of the Responses API: a client keeps the items there and adds to them call by call
    metadata,
    Column("conversation_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False, index=True),
    _json("metadata"),
    Column("created_at", Double, nullable=False),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("position", _serial, primary_key=True, autoincrement=True),  # in the order in which items were added
    Column(
        "conversation_id",
        Text,
        ForeignKey("conversations.conversation_id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    Column("item_id", Text, nullable=False),
    Column("length", Integer, nullable=False),  # bytes of `item` and `shown` as JSON
    Column("item", LargeBinary, nullable=False),  # packed JSON, as the model reads it
    Column("shown", LargeBinary),  # packed JSON, as the client got it; null: equal to `item`
)

rescores = Table(
    "rescores",  # tokens of answers recorded as text, encoded and scored later
    metadata,
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("choice_index", Integer, primary_key=True, autoincrement=False),
    Column("engine_hash", LargeBinary, ForeignKey("engines.engine_hash"), nullable=False),
    Column("weight_version", Text),
    Column("prompt_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("prompt_tokens", Integer, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
)

rewards = Table(
    "rewards",
    metadata,
    Column("reward_id", Text, primary_key=True),
    # One of the two is set: a session that has a rollout gets no reward of its own.
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), index=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), index=True),
    # No foreign keys: a reward outlives its trace, which a later build may replace.
    Column("trace_id", Text),
    Column("call_id", Text),
    Column("source", Text, nullable=False),
    Column("value", Double),  # null: the evaluator returned no value
    _json("detail"),
    Column("created_at", Double, nullable=False),
)

traces = Table(
    "traces",
    metadata,
    Column("trace_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id")),
    Column("builder", Text, nullable=False),
    Column("trace_index", Integer, nullable=False),
    Column("prompt_length", Integer, nullable=False),
    Column("length", Integer, nullable=False),
    Column("trained_tokens", Integer, nullable=False),
    Column("reward", Double),
    Column("grade", Text, nullable=False),
    Column("parent_trace_id", Text),  # builder `tree`: the trace that it branches from after `branch_at` tokens
    Column("branch_at", Integer, nullable=False),
    Column("logprobs", LargeBinary),  # rescored values of the sampled positions; null: the values of the calls
    _json("call_ids"),
    _json("certificate", nullable=True),
    Column("created_at", Double, nullable=False),
    Index(None, "session_id", "builder", "trace_index"),
    Index(None, "rollout_id", "builder"),
)

trace_spans = Table(
    "trace_spans",
    metadata,
    Column("trace_id", Text, ForeignKey("traces.trace_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),  # context, sampled
    Column("call_id", Text, ForeignKey("calls.call_id"), nullable=False),
    Column("choice_index", Integer, nullable=False),
    Column("start_token", Integer, nullable=False),  # position in the prompt (context) or the answer (sampled)
    Column("end_token", Integer, nullable=False),  # position after the last token
)

exclusions = Table(
    "exclusions",
    metadata,
    Column("session_id", Text, ForeignKey("sessions.session_id"), primary_key=True),
    Column("builder", Text, primary_key=True),
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("reason", Text, nullable=False),
)

rollout_events = Table(
    "rollout_events",
    metadata,
    Column("event_id", _serial, primary_key=True, autoincrement=True),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    _json("data"),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("artifact_id", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("sha256", Text, nullable=False),  # stored as artifacts/<first two digits>/<sha256>
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
)

training_runs = Table(
    "training_runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    _json("config"),
    Column("created_at", Double, nullable=False),
)

training_lines = Table(
    "training_lines",
    metadata,
    Column("run_id", Text, ForeignKey("training_runs.run_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),  # start, step, sync, checkpoint, eval
    Column("step", Integer, nullable=False),
    Column("at", Double, nullable=False),
    _json("data"),
)
