"""How a prompt came about, policy versions within an answer, branching and rescored traces, answers scored later.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from polar_proxy.store.migrations.versions.r0001_first import _iso

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table, column in (
        ("calls", sa.Column("prompt_mode", sa.Text(), server_default="render", nullable=False)),
        ("calls", sa.Column("prompt_reason", sa.Text(), nullable=True)),
        ("calls", sa.Column("base_call_id", sa.Text(), nullable=True)),
        ("calls", sa.Column("base_choice", sa.Integer(), nullable=True)),
        ("completions", sa.Column("versions", sa.JSON(none_as_null=True), nullable=True)),
        ("traces", sa.Column("parent_trace_id", sa.Text(), nullable=True)),
        ("traces", sa.Column("branch_at", sa.Integer(), server_default="0", nullable=False)),
        ("traces", sa.Column("logprobs", sa.LargeBinary(), nullable=True)),
    ):
        op.add_column(table, column)
    op.create_table(
        "rescores",
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("choice_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("engine_hash", sa.LargeBinary(), nullable=False),
        sa.Column("weight_version", sa.Text(), nullable=True),
        sa.Column("prompt_node", sa.LargeBinary(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.call_id"], name="fk_rescores_call_id_calls"),
        sa.ForeignKeyConstraint(["engine_hash"], ["engines.engine_hash"], name="fk_rescores_engine_hash_engines"),
        sa.ForeignKeyConstraint(["prompt_node"], ["nodes.node_id"], name="fk_rescores_prompt_node_nodes"),
        sa.PrimaryKeyConstraint("call_id", "choice_index", name="pk_rescores"),
    )
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
        "v_traces": f"""
            SELECT t.trace_id, t.rollout_id, t.session_id, r.task_id, r.group_id, t.builder, t.trace_index, t.grade,
                t.parent_trace_id, t.branch_at, f.edge, f.parent_call_id, f.thread,
                t.prompt_length, t.length, t.trained_tokens, json_array_length(t.call_ids) AS calls,
                t.reward AS trace_reward, r.reward AS rollout_reward, r.status AS rollout_status, r.harness, r.model,
                {iso("t.created_at")} AS created
            FROM traces t LEFT JOIN rollouts r ON r.rollout_id = t.rollout_id
            LEFT JOIN trace_spans b ON b.trace_id = t.trace_id AND b.position = 0
            LEFT JOIN calls f ON f.call_id = b.call_id""",
    }
