"""Smaller calls: the fingerprint of history as a packed cell, the end of a prompt with its call.

Revision ID: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from polar_proxy.store.codec import pack_small_json

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_BATCH = 1000


def upgrade() -> None:
    op.add_column("calls", sa.Column("prompt_tail", sa.LargeBinary(), nullable=True))
    op.add_column("calls", sa.Column("packed_fingerprint", sa.LargeBinary(), nullable=True))
    connection = op.get_bind()
    calls = sa.table("calls", *(sa.column(name) for name in ("call_id", "fingerprint", "packed_fingerprint")))
    # The text as it stands: whatever JSON it is, it comes back as it was.
    text = sa.cast(calls.c.fingerprint, sa.Text)
    write = (
        sa.update(calls)
        .where(calls.c.call_id == sa.bindparam("of_call"))
        .values(packed_fingerprint=sa.bindparam("cell"))
    )
    last = ""
    while True:
        query = sa.select(calls.c.call_id, text).where(calls.c.call_id > last, calls.c.fingerprint.is_not(None))
        rows = connection.execute(query.order_by(calls.c.call_id).limit(_BATCH)).all()
        if not rows:
            break
        connection.execute(write, [{"of_call": row[0], "cell": pack_small_json(row[1].encode())} for row in rows])
        last = rows[-1][0]
    connection.exec_driver_sql("ALTER TABLE calls DROP COLUMN fingerprint")
    connection.exec_driver_sql("ALTER TABLE calls RENAME COLUMN packed_fingerprint TO fingerprint")


def downgrade() -> None:
    raise NotImplementedError("Polar goes back to no earlier schema: restore a copy of the database instead")
