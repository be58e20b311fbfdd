"""The first schema: sessions, calls, chains, rollouts, rewards, traces, and the views for people.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_tables()
    connection = op.get_bind()
    for name, query in _views(connection.dialect.name).items():
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    raise NotImplementedError("This is the first revision: delete the database instead")


def _iso(column: str, dialect: str) -> str:
    """SQL for seconds since the epoch as 2026-01-31T12:00:00.123Z: cut, not rounded, on both databases alike."""
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
            SELECT r.rollout_id, r.task_id, t.family, r.seed, r.group_id, r.group_index, r.status, r.reward,
                r.harness, r.sandbox, r.engine, r.model, r.session_id,
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
                c.status, c.http_status, c.error, c.edge, c.parent_call_id, c.message_count AS messages,
                c.prompt_tokens, c.completion_tokens, c.cached_tokens,
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
                c.call_id, x.choice_index, c.edge, c.status, c.message_count AS messages,
                c.prompt_tokens, x.tokens AS completion_tokens, x.finish_reason,
                c.ended_at - c.started_at AS seconds,
                x.tokens / NULLIF(c.ended_at - c.first_token_at, 0) AS tokens_per_second,
                {iso("c.started_at")} AS started
            FROM calls c LEFT JOIN completions x ON x.call_id = c.call_id
            LEFT JOIN rollouts r ON r.session_id = c.session_id""",
        "v_traces": f"""
            SELECT t.trace_id, t.rollout_id, t.session_id, r.task_id, r.group_id, t.builder, t.trace_index, t.grade,
                t.prompt_length, t.length, t.trained_tokens, json_array_length(t.call_ids) AS calls,
                t.reward AS trace_reward, r.reward AS rollout_reward, r.status AS rollout_status, r.harness, r.model,
                {iso("t.created_at")} AS created
            FROM traces t LEFT JOIN rollouts r ON r.rollout_id = t.rollout_id""",
        "v_rewards": f"""
            SELECT w.reward_id, w.rollout_id, r.group_id, r.task_id, t.family, r.harness, r.model,
                w.trace_id, w.call_id, w.source, w.value, w.detail, {iso("w.created_at")} AS created
            FROM rewards w JOIN rollouts r ON r.rollout_id = w.rollout_id JOIN tasks t ON t.task_id = r.task_id""",
    }


def _create_tables() -> None:
    op.create_table(
        "engines",
        sa.Column("engine_hash", sa.LargeBinary(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("info", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("engine_hash", name="pk_engines"),
    )
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.LargeBinary(), nullable=False),
        sa.Column("parent_id", sa.LargeBinary(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["parent_id"], ["nodes.node_id"], name="fk_nodes_parent_id"),
        sa.PrimaryKeyConstraint("node_id", name="pk_nodes"),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=True),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=True),
        sa.Column("policy", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("calls", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("failed_calls", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_call_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name="pk_sessions"),
        sa.UniqueConstraint("key_hash", name="uq_sessions_key_hash"),
    )
    op.create_index("ix_sessions_rollout_id", "sessions", ["rollout_id"], unique=False)
    op.create_table(
        "settings",
        sa.Column("settings_hash", sa.LargeBinary(), nullable=False),
        sa.Column("value", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("settings_hash", name="pk_settings"),
    )
    op.create_table(
        "tasks",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("instruction", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name="pk_tasks"),
    )
    op.create_table(
        "calls",
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("dialect", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("engine_hash", sa.LargeBinary(), nullable=True),
        sa.Column("weight_version", sa.Text(), nullable=True),
        sa.Column("logprob_mode", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("edge", sa.Text(), nullable=False),
        sa.Column("parent_call_id", sa.Text(), nullable=True),
        sa.Column("message_count", sa.Integer(), nullable=False),
        sa.Column("messages_node", sa.LargeBinary(), nullable=True),
        sa.Column("tools_node", sa.LargeBinary(), nullable=True),
        sa.Column("params_hash", sa.LargeBinary(), nullable=False),
        sa.Column("sampling_hash", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_node", sa.LargeBinary(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("first_token_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["engine_hash"], ["engines.engine_hash"], name="fk_calls_engine_hash"),
        sa.ForeignKeyConstraint(["messages_node"], ["nodes.node_id"], name="fk_calls_messages_node"),
        sa.ForeignKeyConstraint(["params_hash"], ["settings.settings_hash"], name="fk_calls_params_hash"),
        sa.ForeignKeyConstraint(["prompt_node"], ["nodes.node_id"], name="fk_calls_prompt_node"),
        sa.ForeignKeyConstraint(["sampling_hash"], ["settings.settings_hash"], name="fk_calls_sampling_hash"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_calls_session_id"),
        sa.ForeignKeyConstraint(["tools_node"], ["nodes.node_id"], name="fk_calls_tools_node"),
        sa.PrimaryKeyConstraint("call_id", name="pk_calls"),
    )
    op.create_index(
        "ix_calls_session_id_started_at_call_id", "calls", ["session_id", "started_at", "call_id"], unique=False
    )
    op.create_table(
        "groups",
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("config", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.task_id"], name="fk_groups_task_id"),
        sa.PrimaryKeyConstraint("group_id", name="pk_groups"),
    )
    op.create_index("ix_groups_task_id", "groups", ["task_id"], unique=False)
    op.create_table(
        "completions",
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("choice_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("message", sa.LargeBinary(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.call_id"], name="fk_completions_call_id"),
        sa.PrimaryKeyConstraint("call_id", "choice_index", name="pk_completions"),
    )
    op.create_table(
        "exclusions",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("builder", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.call_id"], name="fk_exclusions_call_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_exclusions_session_id"),
        sa.PrimaryKeyConstraint("session_id", "builder", "call_id", name="pk_exclusions"),
    )
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("incomplete", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("harness", sa.Text(), nullable=False),
        sa.Column("sandbox", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("config", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("owner_host", sa.Text(), nullable=True),
        sa.Column("owner_pid", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["group_id"], ["groups.group_id"], name="fk_rollouts_group_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_rollouts_session_id"),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.task_id"], name="fk_rollouts_task_id"),
        sa.PrimaryKeyConstraint("rollout_id", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_group_id", "rollouts", ["group_id"], unique=False)
    op.create_index("ix_rollouts_session_id", "rollouts", ["session_id"], unique=False)
    op.create_index("ix_rollouts_status", "rollouts", ["status"], unique=False)
    op.create_index("ix_rollouts_task_id", "rollouts", ["task_id"], unique=False)
    op.create_table(
        "artifacts",
        sa.Column("artifact_id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name="fk_artifacts_rollout_id"),
        sa.PrimaryKeyConstraint("artifact_id", name="pk_artifacts"),
    )
    op.create_index("ix_artifacts_rollout_id", "artifacts", ["rollout_id"], unique=False)
    op.create_table(
        "events",
        sa.Column("event_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name="fk_events_rollout_id"),
        sa.PrimaryKeyConstraint("event_id", name="pk_events"),
    )
    op.create_index("ix_events_rollout_id", "events", ["rollout_id"], unique=False)
    op.create_table(
        "rewards",
        sa.Column("reward_id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("trace_id", sa.Text(), nullable=True),
        sa.Column("call_id", sa.Text(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("detail", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name="fk_rewards_rollout_id"),
        sa.PrimaryKeyConstraint("reward_id", name="pk_rewards"),
    )
    op.create_index("ix_rewards_rollout_id", "rewards", ["rollout_id"], unique=False)
    op.create_table(
        "traces",
        sa.Column("trace_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=True),
        sa.Column("builder", sa.Text(), nullable=False),
        sa.Column("trace_index", sa.Integer(), nullable=False),
        sa.Column("prompt_length", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("trained_tokens", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("grade", sa.Text(), nullable=False),
        sa.Column("call_ids", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("certificate", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name="fk_traces_rollout_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_traces_session_id"),
        sa.PrimaryKeyConstraint("trace_id", name="pk_traces"),
    )
    op.create_index("ix_traces_rollout_id_builder", "traces", ["rollout_id", "builder"], unique=False)
    op.create_index(
        "ix_traces_session_id_builder_trace_index", "traces", ["session_id", "builder", "trace_index"], unique=False
    )
    op.create_table(
        "trace_spans",
        sa.Column("trace_id", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("choice_index", sa.Integer(), nullable=False),
        sa.Column("start_token", sa.Integer(), nullable=False),
        sa.Column("end_token", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.call_id"], name="fk_trace_spans_call_id"),
        sa.ForeignKeyConstraint(["trace_id"], ["traces.trace_id"], name="fk_trace_spans_trace_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("trace_id", "position", name="pk_trace_spans"),
    )
