"""Alembic migrations. A released file here is never changed: the next revision is a new file."""
