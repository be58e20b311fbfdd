"""The HTTP API: its keys, pauses that end by themselves, callbacks, what became of jobs and groups, a bound on the
staleness of a group. The views show which rollouts are masked.

Revision ID: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from polar_proxy.store.migrations.versions.r0001_first import _iso

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table, column in (
        ("jobs", sa.Column("paused_until", sa.Double(), nullable=True)),
        ("jobs", sa.Column("callback_url", sa.Text(), nullable=True)),
        ("groups", sa.Column("max_staleness", sa.Integer(), nullable=True)),
    ):
        op.add_column(table, column)
    op.create_table(
        "callbacks",
        sa.Column("callback_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("next_attempt_at", sa.Double(), nullable=True),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("callback_id", name="pk_callbacks"),
    )
    op.create_index("ix_callbacks_job_id", "callbacks", ["job_id"])
    op.create_index("ix_callbacks_next_attempt_at", "callbacks", ["next_attempt_at"])
    op.create_table(
        "job_events",
        sa.Column(
            "job_event_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("job_event_id", name="pk_job_events"),
    )
    op.create_index("ix_job_events_job_id", "job_events", ["job_id"])
    op.create_table(
        "api_keys",
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("key_hash", name="pk_api_keys"),
    )
    connection = op.get_bind()
    for name, query in _views(connection.dialect.name).items():
        connection.exec_driver_sql(f"DROP VIEW {name}")
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    raise NotImplementedError("Polar goes back to no earlier schema: restore a copy of the database instead")


def _views(dialect: str) -> dict[str, str]:
    """The views that show rollouts, with what is new."""

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
        "v_traces": f"""
            SELECT t.trace_id, t.rollout_id, t.session_id, r.task_id, r.group_id, t.builder, t.trace_index, t.grade,
                t.parent_trace_id, t.branch_at, f.edge, f.parent_call_id, f.thread,
                t.prompt_length, t.length, t.trained_tokens, json_array_length(t.call_ids) AS calls,
                t.reward AS trace_reward, r.reward AS rollout_reward, r.status AS rollout_status, r.masked,
                r.harness, r.model, {iso("t.created_at")} AS created
            FROM traces t LEFT JOIN rollouts r ON r.rollout_id = t.rollout_id
            LEFT JOIN trace_spans b ON b.trace_id = t.trace_id AND b.position = 0
            LEFT JOIN calls f ON f.call_id = b.call_id""",
    }
