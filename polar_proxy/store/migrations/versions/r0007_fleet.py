"""Several gateways on one database: the calls that each is answering, and a pause of all servers.

Revision ID: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "open_calls",
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("call_id", name="pk_open_calls"),
    )
    op.create_index("ix_open_calls_session_id", "open_calls", ["session_id"])
    op.create_index("ix_open_calls_gateway", "open_calls", ["gateway"])
    fleet = op.create_table(
        "fleet",
        sa.Column("fleet_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("paused_at", sa.Double(), nullable=True),
        sa.Column("paused_until", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("fleet_id", name="pk_fleet"),
    )
    op.bulk_insert(fleet, [{"fleet_id": 1, "paused_at": None, "paused_until": None}])


def downgrade() -> None:
    raise NotImplementedError("Polar goes back to no earlier schema: restore a copy of the database instead")
