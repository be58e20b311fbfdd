"""Jobs, the queue of rollouts with its holds and stages, and the feed of finished groups.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )
    op.create_index("ix_jobs_status", "jobs", ["status"])
    for table, column in (
        ("groups", sa.Column("job_id", sa.Text(), nullable=True)),
        ("groups", sa.Column("wanted", sa.Integer(), nullable=True)),
        ("groups", sa.Column("status", sa.Text(), server_default="open", nullable=False)),
        ("groups", sa.Column("reason", sa.Text(), nullable=True)),
        ("groups", sa.Column("ended_at", sa.Double(), nullable=True)),
        ("groups", sa.Column("delivery", sa.Text(), nullable=True)),
        ("rollouts", sa.Column("job_id", sa.Text(), nullable=True)),
        ("rollouts", sa.Column("attempt", sa.Integer(), server_default="1", nullable=False)),
        ("rollouts", sa.Column("cause", sa.Text(), nullable=True)),
        ("rollouts", sa.Column("masked", sa.Boolean(), server_default="0", nullable=False)),
        ("rollouts", sa.Column("claimed_by", sa.Text(), nullable=True)),
        ("rollouts", sa.Column("lease_expires_at", sa.Double(), nullable=True)),
        ("rollouts", sa.Column("policy_version", sa.Text(), nullable=True)),
    ):
        op.add_column(table, column)
    op.create_index("ix_groups_job_id", "groups", ["job_id"])
    op.create_index("ix_groups_delivery", "groups", ["delivery"])
    op.create_index("ix_rollouts_job_id", "rollouts", ["job_id"])
    op.create_index("ix_rollouts_claimed_by", "rollouts", ["claimed_by"])
    op.create_table(
        "stages",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name="fk_stages_rollout_id_rollouts"),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "stage", name="pk_stages"),
    )
    op.create_table(
        "leases",
        sa.Column("lease_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("consumer", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Text(), nullable=True),
        sa.Column("leased_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["group_id"], ["groups.group_id"], name="fk_leases_group_id_groups"),
        sa.PrimaryKeyConstraint("lease_id", name="pk_leases"),
    )
    open_leases = sa.text("ended_at IS NULL")
    op.create_index(
        "uq_leases_group_id_open",
        "leases",
        ["group_id"],
        unique=True,
        sqlite_where=open_leases,
        postgresql_where=open_leases,
    )


def downgrade() -> None:
    raise NotImplementedError("Polar goes back to no earlier schema: restore a copy of the database instead")
