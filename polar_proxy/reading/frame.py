"""Columns read from a database, as tables of Arrow, pandas and Polars.

Arrow's PyCapsule interface (`__arrow_c_stream__`) passes the columns to other libraries without a copy:
https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from polar_proxy.errors import UsageError
from polar_proxy.types import Json

Columns = dict[str, list[Any]]

_ISO_TIMES = frozenset({"created", "started", "ended"})
_EPOCH_TIMES = frozenset({"created_at", "closed_at", "last_call_at"})


class RecordFrame:
    """Rows of a recording as columns. The database is read once, when the rows are first used.

    Polars and other libraries take a frame as it is: `polars.DataFrame(frame)`, `pyarrow.table(frame)`.
    """

    def __init__(self, load: Callable[[], Columns]) -> None:
        self._load = load

    @cached_property
    def columns(self) -> Columns:
        """The values of each column by name. Times are ISO text or seconds since the epoch, as the database returns
        them."""
        return self._load()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __iter__(self) -> Iterator[Json]:
        """Yield each row as a dict."""
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, values, strict=True))

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table`. Its times are timestamps in UTC. Raises UsageError without pyarrow."""
        arrow = _require("pyarrow", "arrow")
        return arrow.table({name: _arrow_column(arrow, name, values) for name, values in self.columns.items()})

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`. Raises UsageError without pandas and pyarrow."""
        _require("pandas", "pandas")
        return self.to_arrow().to_pandas()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return f"RecordFrame({len(self)} rows: {', '.join(self.columns)})"


def _arrow_column(arrow: Any, name: str, values: list[Any]) -> Any:
    if name in _ISO_TIMES:
        return arrow.array(values, arrow.string()).cast(arrow.timestamp("ms", "UTC"))
    if name in _EPOCH_TIMES:
        micros = [None if value is None else round(value * 1e6) for value in values]
        return arrow.array(micros, arrow.int64()).cast(arrow.timestamp("us", "UTC"))
    return arrow.array(values)


def _require(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Converting the rows needs the package {package}: pip install 'polar-proxy[{extra}]'"
        ) from error
