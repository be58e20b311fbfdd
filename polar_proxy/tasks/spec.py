"""A task as the JSON that the store keeps, and back."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from polar_proxy.tasks.task import BadTaskError, Task
from polar_proxy.types import Json


def task_to_json(task: Task) -> Json:
    """All of the task, as JSON values."""
    return asdict(task)


def task_from_json(spec: Json) -> Task:
    """The task that `task_to_json` wrote down. Raises `BadTaskError` for what this version cannot read."""
    try:
        return TypeAdapter(Task).validate_python(spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BadTaskError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}") from None
