"""How much is stored."""

from __future__ import annotations

from sqlalchemy import func, select, text

from polar_proxy.store import migrate, schema
from polar_proxy.store.base import Repository
from polar_proxy.types import Json


class StatisticsRepository(Repository):
    async def stats(self) -> Json:
        """Rows of every table, bytes on disk, tokens by kind, the schema revision.

        `prompt_tokens` are as the calls saw them; `stored_prompt_tokens` are what is left after sharing.
        """
        s, n = schema.sessions.c, schema.nodes.c
        async with self._database.reading() as connection:
            rows = {
                table.name: await connection.scalar(select(func.count()).select_from(table))
                for table in schema.metadata.sorted_tables
            }
            prompt, completion = (
                await connection.execute(
                    select(func.coalesce(func.sum(s.prompt_tokens), 0), func.coalesce(func.sum(s.completion_tokens), 0))
                )
            ).one()
            stored = await connection.scalar(select(func.coalesce(func.sum(n.length), 0)).where(n.kind == "tokens"))
            if self._database.dialect == "sqlite":
                size = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
            else:
                size = "SELECT pg_database_size(current_database())"
            return {
                "schema": await migrate.revision(connection),
                "database": self._database.dialect,
                "bytes": int(await connection.scalar(text(size)) or 0),
                "rows": rows,
                "tokens": {
                    "prompt_tokens": int(prompt),
                    "completion_tokens": int(completion),
                    "stored_prompt_tokens": int(stored or 0),
                },
            }
