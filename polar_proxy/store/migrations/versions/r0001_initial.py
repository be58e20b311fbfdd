"""Create the tables and the views.

Revision ID: 0001

The tables are a copy of `schema` at this revision: later revisions change what this one created, so it must not follow
later changes of `schema`.
"""

from __future__ import annotations

from typing import Any

from alembic import op
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
    insert,
    text,
)

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    _metadata.create_all(connection)
    connection.execute(insert(_metadata.tables["fleet"]).values(fleet_id=1))
    for name, query in _views(connection.dialect.name).items():
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    raise NotImplementedError("This is the first revision: delete the database instead")


def _iso(column: str, dialect: str) -> str:
    """Return SQL for seconds since the epoch as 2026-01-31T12:00:00.123Z, truncated to milliseconds."""
    if dialect == "sqlite":
        return (
            f"strftime('%Y-%m-%dT%H:%M:%S', CAST({column} AS INTEGER), 'unixepoch')"
            f" || printf('.%03dZ', CAST(({column} - CAST({column} AS INTEGER)) * 1000 AS INTEGER))"
        )
    return (
        f"to_char(to_timestamp(floor({column})) AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS')"
        f" || '.' || lpad(CAST(CAST(floor(({column} - floor({column})) * 1000) AS INTEGER) AS TEXT), 3, '0') || 'Z'"
    )


def _views(dialect: str) -> dict[str, str]:
    def iso(column: str) -> str:
        return _iso(column, dialect)

    return {
        "v_rollouts": f"""
            SELECT r.rollout_id, r.task_id, t.family, r.seed, r.group_id, r.group_index, r.job_id, r.status, r.cause,
                r.attempt, r.reward, r.masked, r.harness, r.sandbox, r.engine, r.model, r.policy_version, r.session_id,
                COALESCE(s.calls, 0) AS calls, COALESCE(s.prompt_tokens, 0) AS prompt_tokens,
                COALESCE(s.completion_tokens, 0) AS completion_tokens,
                (SELECT COUNT(*) FROM traces x WHERE x.rollout_id = r.rollout_id AND x.builder = 'merged') AS traces,
                (SELECT COALESCE(SUM(x.trained_tokens), 0) FROM traces x
                    WHERE x.rollout_id = r.rollout_id AND x.builder = 'merged') AS trained_tokens,
                r.incomplete, r.exit_code, r.error, r.ended_at - r.started_at AS seconds,
                {iso("r.created_at")} AS created, {iso("r.started_at")} AS started, {iso("r.ended_at")} AS ended
            FROM rollouts r JOIN tasks t ON t.task_id = r.task_id
            LEFT JOIN sessions s ON s.session_id = r.session_id""",
        "v_calls": f"""
            SELECT c.call_id, c.session_id, s.label AS session_label, r.rollout_id, c.dialect, c.path, c.stream,
                c.model, e.engine, e.version AS engine_version, c.weight_version, c.logprob_mode,
                c.status, c.http_status, c.error, c.edge, c.parent_call_id, c.rule, c.ambiguous, c.thread,
                c.prompt_mode, c.prompt_reason, c.base_call_id, c.base_choice,
                c.message_count AS messages, c.prompt_tokens, c.completion_tokens, c.cached_tokens,
                (SELECT COUNT(*) FROM completions x WHERE x.call_id = c.call_id) AS choices,
                (SELECT x.finish_reason FROM completions x WHERE x.call_id = c.call_id
                    ORDER BY x.choice_index LIMIT 1) AS finish_reason,
                c.first_token_at - c.started_at AS first_token_seconds, c.ended_at - c.started_at AS seconds,
                {iso("c.started_at")} AS started, {iso("c.ended_at")} AS ended,
                p.value AS params, g.value AS sampling
            FROM calls c JOIN sessions s ON s.session_id = c.session_id
            JOIN settings p ON p.settings_hash = c.params_hash
            JOIN settings g ON g.settings_hash = c.sampling_hash
            LEFT JOIN rollouts r ON r.session_id = c.session_id
            LEFT JOIN engines e ON e.engine_hash = c.engine_hash""",
        "v_turns": f"""
            SELECT c.session_id, r.rollout_id,
                DENSE_RANK() OVER (PARTITION BY c.session_id ORDER BY c.started_at, c.call_id) AS turn,
                c.call_id, x.choice_index, c.thread, c.edge, c.rule, c.ambiguous, c.status,
                c.message_count AS messages, c.prompt_tokens, x.tokens AS completion_tokens, x.finish_reason,
                c.ended_at - c.started_at AS seconds,
                x.tokens / NULLIF(c.ended_at - c.first_token_at, 0) AS tokens_per_second,
                {iso("c.started_at")} AS started
            FROM calls c LEFT JOIN completions x ON x.call_id = c.call_id
            LEFT JOIN rollouts r ON r.session_id = c.session_id""",
        "v_traces": f"""
            SELECT t.trace_id, t.rollout_id, t.session_id, r.task_id, r.group_id, t.builder, t.trace_index, t.grade,
                t.parent_trace_id, t.branch_at, f.edge, f.parent_call_id, f.thread,
                t.prompt_length, t.length, t.trained_tokens, json_array_length(t.call_ids) AS calls,
                t.reward AS trace_reward, r.reward AS rollout_reward, r.status AS rollout_status, r.masked,
                r.harness, r.model, {iso("t.created_at")} AS created
            FROM traces t LEFT JOIN rollouts r ON r.rollout_id = t.rollout_id
            LEFT JOIN trace_spans b ON b.trace_id = t.trace_id AND b.position = 0
            LEFT JOIN calls f ON f.call_id = b.call_id""",
        "v_rewards": f"""
            SELECT w.reward_id, w.rollout_id, r.group_id, r.task_id, t.family, r.harness, r.model,
                w.trace_id, w.call_id, w.source, w.value, w.detail, {iso("w.created_at")} AS created
            FROM rewards w JOIN rollouts r ON r.rollout_id = w.rollout_id JOIN tasks t ON t.task_id = r.task_id""",
    }


def _json(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, JSON(none_as_null=True), nullable=nullable)


def _counter(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default="0")


_serial = BigInteger().with_variant(Integer, "sqlite")
_metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

Table(
    "tasks",
    _metadata,
    Column("task_id", Text, primary_key=True),
    Column("family", Text, nullable=False),
    Column("seed", BigInteger),
    Column("instruction", Text, nullable=False),
    _json("spec"),
    Column("created_at", Double, nullable=False),
)

Table(
    "jobs",
    _metadata,
    Column("job_id", Text, primary_key=True),
    Column("idempotency_key", Text, unique=True),
    Column("label", Text),
    _json("spec"),
    Column("priority", Integer, nullable=False),
    Column("status", Text, nullable=False, index=True),
    Column("error", Text),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("paused_until", Double),
    Column("callback_url", Text),
)

Table(
    "groups",
    _metadata,
    Column("group_id", Text, primary_key=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False, index=True),
    Column("rollout_count", Integer, nullable=False),
    _json("config"),
    Column("created_at", Double, nullable=False),
    Column("job_id", Text, index=True),
    Column("group_size", Integer, nullable=False),
    Column("status", Text, nullable=False, server_default="open"),
    Column("reason", Text),
    Column("ended_at", Double),
    Column("delivery", Text, index=True),
    Column("max_staleness", Integer),
)

Table(
    "sessions",
    _metadata,
    Column("session_id", Text, primary_key=True),
    Column("key_hash", LargeBinary, unique=True),
    Column("label", Text),
    Column("origin", Text, nullable=False),
    Column("rollout_id", Text, index=True),
    _json("policy", nullable=True),
    Column("created_at", Double, nullable=False),
    Column("closed_at", Double),
    _counter("calls"),
    _counter("failed_calls"),
    _counter("prompt_tokens"),
    _counter("completion_tokens"),
    Column("last_call_at", Double),
)

Table(
    "rollouts",
    _metadata,
    Column("rollout_id", Text, primary_key=True),
    Column("group_id", Text, ForeignKey("groups.group_id"), nullable=False, index=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False, index=True),
    Column("group_index", Integer, nullable=False),
    Column("session_id", Text, ForeignKey("sessions.session_id"), index=True),
    Column("status", Text, nullable=False, index=True),
    Column("incomplete", Boolean, nullable=False, server_default="0"),
    Column("reward", Double),
    Column("exit_code", Integer),
    Column("error", Text),
    Column("harness", Text, nullable=False),
    Column("sandbox", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("seed", BigInteger),
    _json("config"),
    Column("owner_host", Text),
    Column("owner_pid", BigInteger),
    Column("job_id", Text, index=True),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("cause", Text),
    Column("masked", Boolean, nullable=False, server_default="0"),
    Column("claimed_by", Text, index=True),
    Column("lease_expires_at", Double),
    Column("policy_version", Text),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
)

Table(
    "stages",
    _metadata,
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("stage", Text, primary_key=True),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", Text),
    Column("cause", Text),
    Column("worker", Text),
)

Table(
    "leases",
    _metadata,
    Column("lease_id", Text, primary_key=True),
    Column("group_id", Text, ForeignKey("groups.group_id"), nullable=False),
    Column("consumer", Text, nullable=False),
    Column("policy_version", Text),
    Column("leased_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", Text),
    Index(
        "uq_leases_group_id_open",
        "group_id",
        unique=True,
        sqlite_where=text("ended_at IS NULL"),
        postgresql_where=text("ended_at IS NULL"),
    ),
)

Table(
    "callbacks",
    _metadata,
    Column("callback_id", Text, primary_key=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("kind", Text, nullable=False),
    Column("body", Text),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("next_attempt_at", Double, index=True),
    Column("delivered_at", Double),
    Column("error", Text),
)

Table(
    "job_events",
    _metadata,
    Column("job_event_id", _serial, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False, index=True),
    Column("group_id", Text),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    _json("data"),
)

Table(
    "api_keys",
    _metadata,
    Column("key_hash", LargeBinary, primary_key=True),
    Column("role", Text, nullable=False),
    Column("label", Text),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)

Table(
    "open_calls",
    _metadata,
    Column("call_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False, index=True),
    Column("gateway", Text, nullable=False, index=True),
    Column("started_at", Double, nullable=False),
    Column("lease_expires_at", Double, nullable=False),
)

Table(
    "fleet",
    _metadata,
    Column("fleet_id", Integer, primary_key=True, autoincrement=False),
    Column("paused_at", Double),
    Column("paused_until", Double),
)

Table(
    "nodes",
    _metadata,
    Column("node_id", LargeBinary, primary_key=True),
    Column("parent_id", LargeBinary, ForeignKey("nodes.node_id")),
    Column("kind", Text, nullable=False),
    Column("length", Integer, nullable=False),
    Column("chain_length", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

Table(
    "engines",
    _metadata,
    Column("engine_hash", LargeBinary, primary_key=True),
    Column("engine", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("model", Text, nullable=False),
    _json("info"),
)

Table(
    "settings",
    _metadata,
    Column("settings_hash", LargeBinary, primary_key=True),
    _json("value"),
)

Table(
    "calls",
    _metadata,
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
    Column("parent_call_id", Text),
    Column("rule", Text),
    Column("ambiguous", Boolean, nullable=False),
    Column("thread", Text),
    Column("fingerprint", LargeBinary),
    Column("prompt_mode", Text, nullable=False),
    Column("prompt_reason", Text),
    Column("base_call_id", Text),
    Column("base_choice", Integer),
    Column("message_count", Integer, nullable=False),
    Column("messages_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("tools_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("params_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("sampling_hash", LargeBinary, ForeignKey("settings.settings_hash"), nullable=False),
    Column("prompt_node", LargeBinary, ForeignKey("nodes.node_id")),
    Column("prompt_tail", LargeBinary),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer),
    Column("started_at", Double, nullable=False),
    Column("first_token_at", Double),
    Column("ended_at", Double, nullable=False),
    Index(None, "session_id", "started_at", "call_id"),
)

Table(
    "completions",
    _metadata,
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("choice_index", Integer, primary_key=True, autoincrement=False),
    Column("finish_reason", Text),
    Column("tokens", Integer, nullable=False),
    Column("message", LargeBinary, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    _json("versions", nullable=True),
)

Table(
    "rescores",
    _metadata,
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

Table(
    "rewards",
    _metadata,
    Column("reward_id", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    Column("trace_id", Text),
    Column("call_id", Text),
    Column("source", Text, nullable=False),
    Column("value", Double),
    _json("detail"),
    Column("created_at", Double, nullable=False),
)

Table(
    "traces",
    _metadata,
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
    Column("parent_trace_id", Text),
    Column("branch_at", Integer, nullable=False),
    Column("logprobs", LargeBinary),
    _json("call_ids"),
    _json("certificate", nullable=True),
    Column("created_at", Double, nullable=False),
    Index(None, "session_id", "builder", "trace_index"),
    Index(None, "rollout_id", "builder"),
)

Table(
    "trace_spans",
    _metadata,
    Column("trace_id", Text, ForeignKey("traces.trace_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("call_id", Text, ForeignKey("calls.call_id"), nullable=False),
    Column("choice_index", Integer, nullable=False),
    Column("start_token", Integer, nullable=False),
    Column("end_token", Integer, nullable=False),
)

Table(
    "exclusions",
    _metadata,
    Column("session_id", Text, ForeignKey("sessions.session_id"), primary_key=True),
    Column("builder", Text, primary_key=True),
    Column("call_id", Text, ForeignKey("calls.call_id"), primary_key=True),
    Column("reason", Text, nullable=False),
)

Table(
    "rollout_events",
    _metadata,
    Column("event_id", _serial, primary_key=True, autoincrement=True),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    _json("data"),
)

Table(
    "artifacts",
    _metadata,
    Column("artifact_id", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.rollout_id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
)

Table(
    "training_runs",
    _metadata,
    Column("run_id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    _json("config"),
    Column("created_at", Double, nullable=False),
)

Table(
    "training_lines",
    _metadata,
    Column("run_id", Text, ForeignKey("training_runs.run_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("at", Double, nullable=False),
    _json("data"),
)
