"""Statements for many rows, whose SQL and converters of values are prepared once.

SQLAlchemy by itself looks up the parameters and their converters again for every row, which takes longer than SQLite
takes to insert the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Insert, Update
from sqlalchemy.sql.compiler import SQLCompiler

_Converters = list[tuple[int, Callable[[Any], Any]]]


class PreparedStatement:
    """An INSERT or UPDATE of one database. All rows that it is executed for have the same keys."""

    def __init__(self, statement: Insert | Update) -> None:
        self._statement = statement
        self._sql = ""
        self._values_of: Callable[[Mapping[str, object]], Sequence[object]] = tuple
        self._converters: _Converters = []
        """(position of a parameter, function that converts its value to what the driver takes)."""

    def execute(self, connection: Connection, rows: Sequence[Mapping[str, object]]) -> None:
        """Execute the statement for each of these rows, at least one."""
        if not self._sql:
            self._prepare(connection, rows[0])
        connection.exec_driver_sql(self._sql, [self._parameters(row) for row in rows])

    def _prepare(self, connection: Connection, row: Mapping[str, object]) -> None:
        dialect = connection.dialect
        compiled = self._statement.compile(dialect=dialect, column_keys=list(row))
        assert isinstance(compiled, SQLCompiler)
        names = compiled.positiontup
        assert names is not None
        for position, name in enumerate(names):
            convert = compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)
            if convert is not None:
                self._converters.append((position, convert))
        self._values_of = itemgetter(*names)
        self._sql = str(compiled)

    def _parameters(self, row: Mapping[str, object]) -> tuple[object, ...]:
        values = list(self._values_of(row))
        for position, convert in self._converters:
            values[position] = convert(values[position])
        return tuple(values)
