"""Where a call stands in its session: the rule that decided, whether it was sure, the thread, the fingerprint.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from polar_proxy.store.migrations.versions.r0001_first import _iso

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("rule", sa.Text(), nullable=True),
        sa.Column("ambiguous", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("thread", sa.Text(), nullable=True),
        sa.Column("fingerprint", sa.JSON(none_as_null=True), nullable=True),
    ):
        op.add_column("calls", column)
    connection = op.get_bind()
    for name, query in _views(connection.dialect.name).items():
        connection.exec_driver_sql(f"DROP VIEW {name}")
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    raise NotImplementedError("Polar goes back to no earlier schema: restore a copy of the database instead")


def _views(dialect: str) -> dict[str, str]:
    """The views that show calls, with what is new."""

    def iso(column: str) -> str:
        return _iso(column, dialect)

    return {
        "v_calls": f"""
            SELECT c.call_id, c.session_id, s.label AS session_label, r.rollout_id, c.dialect, c.path, c.stream,
                c.model, e.engine, e.version AS engine_version, c.weight_version, c.logprob_mode,
                c.status, c.http_status, c.error, c.edge, c.parent_call_id, c.rule, c.ambiguous, c.thread,
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
                f.edge, f.parent_call_id, f.thread,
                t.prompt_length, t.length, t.trained_tokens, json_array_length(t.call_ids) AS calls,
                t.reward AS trace_reward, r.reward AS rollout_reward, r.status AS rollout_status, r.harness, r.model,
                {iso("t.created_at")} AS created
            FROM traces t LEFT JOIN rollouts r ON r.rollout_id = t.rollout_id
            LEFT JOIN trace_spans b ON b.trace_id = t.trace_id AND b.position = 0
            LEFT JOIN calls f ON f.call_id = b.call_id""",
    }
