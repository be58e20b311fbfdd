"""The tables as they are at the newest revision. `migrations/` makes them; a test holds the two together.

Times are seconds since the epoch (double precision), ids are text that sorts by time of creation, hashes are 16 bytes
(keys: 32). JSON columns hold JSON text that the databases' own JSON functions read. Packed cells: see `codec`.
"""

from __future__ import annotations

from typing import Any

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

from polar_proxy.store import codec, json_codec
from polar_proxy.store.rows import FINAL_STATUSES

VERSION_TABLE = "polar_schema"
"""Holds the schema revision; a database without it is not Polar's."""

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
    """JSON that only Polar reads: a packed cell, a third of the text."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else codec.pack_small_json(json_codec.dumps(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json_codec.loads(codec.unpack_small_json(value))


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
    "jobs",  # what was submitted at once: groups of rollouts under one specification
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
    Column("paused_until", Double),  # of a paused one: when it goes on by itself; null: when somebody says so
    Column("callback_url", Text),  # told of its groups and of its end
)

groups = Table(
    "groups",
    metadata,
    Column("group_id", Text, primary_key=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False, index=True),
    Column("size", Integer, nullable=False),
    _json("config"),
    Column("created_at", Double, nullable=False),
    Column("job_id", Text, index=True),
    Column("wanted", Integer),  # how many of `size` decide the group; null: all
    Column("status", Text, nullable=False, server_default="open"),  # then: finished, cancelled
    Column("reason", Text),  # why it was ended or dropped
    Column("ended_at", Double),
    Column("delivery", Text, index=True),  # to a trainer: open, waiting, leased, delivered, dropped; null: not offered
    Column("max_staleness", Integer),  # in policy versions, of an offered group; null: no bound
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("key_hash", LargeBinary, unique=True),  # sha256; the key itself is never stored
    Column("label", Text),
    Column("origin", Text, nullable=False),  # key, open, rollout
    # No foreign key: rollouts.session_id points here already, and one circle of keys is one too many to insert.
    Column("rollout_id", Text, index=True),
    _json("policy", nullable=True),
    Column("created_at", Double, nullable=False),
    Column("closed_at", Double),
    # Kept in the transaction that adds the calls, so that a listing never counts calls.
    _counter("calls"),
    _counter("failed_calls"),
    _counter("prompt_tokens"),
    _counter("completion_tokens"),
    Column("last_call_at", Double),
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
    Column("incomplete", Boolean, nullable=False, server_default="0"),  # capture broke: never trained on
    Column("reward", Double),  # the newest reward of the rollout itself; all of them are in `rewards`
    Column("exit_code", Integer),
    Column("error", Text),
    Column("harness", Text, nullable=False),
    Column("sandbox", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("seed", BigInteger),
    _json("config"),
    Column("owner_host", Text),  # the process that works on it, so that a restart can tell what was left behind
    Column("owner_pid", BigInteger),
    Column("job_id", Text, index=True),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("cause", Text),  # of a failure, or of the last retry
    Column("masked", Boolean, nullable=False, server_default="0"),  # in its group's baseline, not trained on
    Column("claimed_by", Text, index=True),  # the worker that has it, until `lease_expires_at` unless it says so again
    Column("lease_expires_at", Double),
    Column("policy_version", Text),  # when it was dispatched
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),  # when the agent began
    Column("ended_at", Double),  # when a final status was reached
)

rollout_is_final = rollouts.c.status.in_(sorted(FINAL_STATUSES))
"""The condition that a rollout has come to its end."""

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
    Column("policy_version", Text),  # of the trainer, when it asked
    Column("leased_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", Text),  # acknowledged, returned, expired
    # No group is with two consumers, whatever two gateways do at one moment.
    Index(
        "uq_leases_group_id_open",
        "group_id",
        unique=True,
        sqlite_where=text("ended_at IS NULL"),
        postgresql_where=text("ended_at IS NULL"),
    ),
)

callbacks = Table(
    "callbacks",  # what a job's callback_url is still to be told, or was
    metadata,
    Column("callback_id", Text, primary_key=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("kind", Text, nullable=False),  # group.finished, group.cancelled, job.ended
    Column("body", Text),  # as it was first sent, and is sent again; null: not yet
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("next_attempt_at", Double, index=True),  # when it is tried next; null: it was delivered, or given up
    Column("delivered_at", Double),
    Column("error", Text),  # of the last attempt
)

job_events = Table(
    "job_events",  # what became of jobs and groups; `events` has what became of rollouts
    metadata,
    Column("job_event_id", _serial, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),  # job, group, feed
    _json("data"),
)

api_keys = Table(
    "api_keys",  # of the HTTP API; agents' keys are those of sessions
    metadata,
    Column("key_hash", LargeBinary, primary_key=True),  # sha256; the key itself is never stored
    Column("role", Text, nullable=False),  # admin, trainer
    Column("label", Text),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)

open_calls = Table(
    "open_calls",  # being answered, where several gateways share the database: gone in the commit of the call
    metadata,
    Column("call_id", Text, primary_key=True),
    # No foreign key: a row may outlive its session for a moment, and must never keep one from being pruned.
    Column("session_id", Text, nullable=False, index=True),
    Column("gateway", Text, nullable=False, index=True),  # HOST:PID:..., which renews `lease_expires_at` while it lives
    Column("started_at", Double, nullable=False),
    Column("lease_expires_at", Double, nullable=False),  # over: the call is lost
)

fleet = Table(
    "fleet",  # of all servers on this database: one row, which every claim of work reads
    metadata,
    Column("fleet_id", Integer, primary_key=True, autoincrement=False),  # 1
    Column("paused_at", Double),  # null: it takes work
    Column("paused_until", Double),  # when a pause ends by itself; null: when somebody says so
)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", LargeBinary, primary_key=True),
    Column("parent_id", LargeBinary, ForeignKey("nodes.node_id")),
    Column("kind", Text, nullable=False),  # message, tools, tokens
    Column("length", Integer, nullable=False),  # own tokens (kind tokens) or bytes
    Column("total", BigInteger, nullable=False),  # with all nodes above
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
    Column("rule", Text),  # of history, that gave it its edge
    Column("ambiguous", Boolean, nullable=False, server_default="0"),
    Column("thread", Text),
    Column("fingerprint", PackedJson),  # by which history knows it again after a restart
    Column("prompt_mode", Text, nullable=False, server_default="render"),  # or continue
    Column("prompt_reason", Text),  # why it was not continued from its base
    Column("base_call_id", Text),  # the answered call that it extends by meaning
    Column("base_choice", Integer),
    Column("message_count", Integer, nullable=False),
    Column("messages_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("tools_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("params_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("sampling_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("prompt_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("prompt_tail", LargeBinary),  # packed ids that stand behind the chain of `prompt_node`
    Column("prompt_tokens", Integer),  # null: the engine gave no ids
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer),
    Column("started_at", Double, nullable=False),
    Column("first_token_at", Double),
    Column("ended_at", Double, nullable=False),
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
    _json("versions", nullable=True),  # [[first position, policy version], ...] where it changed within
)

rescores = Table(
    "rescores",  # tokens of an answer that came as text: encoded and scored later, never sampled here
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
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    # No foreign keys: a reward outlives the trace it was given to, which a later build may replace.
    Column("trace_id", Text),
    Column("call_id", Text),
    Column("source", Text, nullable=False),
    Column("value", Double),  # null: the evaluator could not say
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
    Column("parent_trace_id", Text),  # builder tree: what it branches from, behind `branch_at` tokens of its path
    Column("branch_at", Integer, nullable=False, server_default="0"),
    Column("logprobs", LargeBinary),  # rescored ones of the sampled positions; null: those of the calls
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
    Column("start_token", Integer, nullable=False),  # half open, within the call's prompt or choice
    Column("end_token", Integer, nullable=False),
)

exclusions = Table(
    "exclusions",
    metadata,
    Column("session_id", Text, ForeignKey("sessions.session_id"), primary_key=True),
    Column("builder", Text, primary_key=True),
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("reason", Text, nullable=False),
)

events = Table(
    "events",
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
    Column("sha256", Text, nullable=False),  # the file is artifacts/<first two>/<sha256>
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
