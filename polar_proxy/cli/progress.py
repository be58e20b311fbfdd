"""A bar on standard error for long work, where somebody looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from polar_proxy.cli import common


@contextlib.contextmanager
def counting(title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """`with counting("audit", 20) as told: told(1, "3 traces")`: so many of the total are done, and what came of it."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = Progress(
        *columns, TimeElapsedColumn(), console=common.err, transient=True, disable=not common.err.is_terminal
    )
    task = bar.add_task("", total=total)
    with bar:
        yield lambda done, said: bar.update(task, completed=done, description=said)
