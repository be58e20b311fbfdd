"""Create the tables and the views.

Revision ID: 0001

This schema has not been released yet, so this revision creates the tables as `schema` defines them now. A released
revision must not change: before you add revision 0002, copy the table definitions from `schema` into this file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from alembic import op
from sqlalchemy import insert

from polar_proxy.store import schema

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    schema.open_leases.dialect_options["postgresql"]["where"] = schema.OPEN_LEASE
    schema.metadata.create_all(connection, checkfirst=False)  # the database is empty
    connection.execute(insert(schema.fleet).values(fleet_id=1))
    for name, query in _views(connection.dialect.name).items():
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {query}")


def _iso(column: str, dialect: str) -> str:
    """Return SQL that writes a column of seconds since the epoch as 2026-01-31T12:00:00.123Z, truncated to
    milliseconds."""
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
    """Return the query of each view by its name."""
    iso = partial(_iso, dialect=dialect)
    return _call_views(iso) | _training_views(iso)


def _call_views(iso: Callable[[str], str]) -> dict[str, str]:
    return {
        "v_rollouts": f"""
            SELECT r.rollout_id, r.task_id, t.family, r.seed, r.group_id, r.group_index, r.job_id, r.status, r.cause,
                r.attempt, r.reward, r.masked, r.harness, r.sandbox, r.engine, r.model, r.policy_version, r.session_id,
                COALESCE(s.calls, 0) AS calls, COALESCE(s.prompt_tokens, 0) AS prompt_tokens,
                COALESCE(s.completion_tokens, 0) AS completion_tokens, s.price_usd,
                (SELECT COUNT(*) FROM traces x WHERE x.rollout_id = r.rollout_id AND x.builder = 'merged') AS traces,
                (SELECT COALESCE(SUM(x.trained_tokens), 0) FROM traces x
                    WHERE x.rollout_id = r.rollout_id AND x.builder = 'merged') AS trained_tokens,
                r.incomplete, r.exit_code, r.error, r.ended_at - r.started_at AS seconds,
                {iso("r.created_at")} AS created, {iso("r.started_at")} AS started, {iso("r.ended_at")} AS ended
            FROM rollouts r JOIN tasks t ON t.task_id = r.task_id
            LEFT JOIN sessions s ON s.session_id = r.session_id""",
        "v_calls": f"""
            SELECT c.call_id, c.session_id, s.label AS session_label, r.rollout_id, c.dialect, c.path, c.stream,
                c.model, e.engine, e.version AS engine_version, c.engine_name, c.route,
                c.weight_version, c.logprob_mode, c.status, c.http_status, c.error,
                c.edge, c.parent_call_id, c.rule, c.ambiguous, c.thread,
                c.prompt_mode, c.prompt_reason, c.base_call_id, c.base_choice,
                c.message_count AS messages, c.prompt_tokens, c.completion_tokens, c.cached_tokens,
                c.input_tokens, c.output_tokens, c.cache_write_tokens, c.cache_write_1h_tokens, c.reasoning_tokens,
                c.usage_model, c.service_tier, c.usage_estimated, c.price_usd,
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
    }


def _training_views(iso: Callable[[str], str]) -> dict[str, str]:
    return {
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
            SELECT w.reward_id, w.rollout_id, w.session_id, r.group_id, r.task_id, t.family, r.harness, r.model,
                w.trace_id, w.call_id, w.source, w.value, w.detail, {iso("w.created_at")} AS created
            FROM rewards w LEFT JOIN rollouts r ON r.rollout_id = w.rollout_id
            LEFT JOIN tasks t ON t.task_id = r.task_id""",
    }
