"""Tasks made by a function: `polar run examples.tasks.arithmetic:tasks`."""

from __future__ import annotations

from collections.abc import Iterator

from polar_proxy.rewards import CommandEvaluator
from polar_proxy.tasks import Task


def tasks() -> Iterator[Task]:
    """Return three tasks: each asks for a sum, to be written to a file."""
    for first, second in ((17, 25), (123, 456), (99, 901)):
        check = ("sh", "-c", f'test "$(cat answer.txt)" = {first + second}')
        yield Task(
            task_id=f"sum-{first}-{second}",
            family="arithmetic",
            seed=0,
            instruction=f"Write the sum of {first} and {second} to answer.txt.",
            files={"README.md": "Nothing here yet.\n"},
            evaluators=(CommandEvaluator(check),),
        )
