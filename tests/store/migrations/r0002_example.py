"""A revision that only tests apply: a new column with a value for existing rows.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("example", sa.Text(), nullable=True))
    op.get_bind().exec_driver_sql("UPDATE sessions SET example = session_id")
