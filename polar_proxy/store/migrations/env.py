"""Run the migrations. `polar_proxy.store.migrate` provides the connection, which already has a transaction."""

from __future__ import annotations

from alembic import context

from polar_proxy.store.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
