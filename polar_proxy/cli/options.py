"""Command-line options made from the fields of a pydantic model, so that an option is defined in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, get_args

import typer
from annotated_types import Ge
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def model_options(
    model: type[BaseModel], *, parameter: str = "options", exclude: frozenset[str] = frozenset()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of `model`, which replace its parameter `parameter`.

    The command receives a dict with the options that were given. Values are validated by the model, not here.
    """
    fields = {name: field for name, field in model.model_fields.items() if name not in exclude}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in fields}
            command(**arguments, **{parameter: {name: value for name, value in given.items() if value is not None}})

        parameters = []
        for name, own in inspect.signature(command, eval_str=True).parameters.items():
            if name == parameter:
                parameters += [_option(field_name, field) for field_name, field in fields.items()]
            else:
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapper

    return decorate


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    minimum: Any = next((limit.ge for limit in field.metadata if isinstance(limit, Ge)), None)
    option = typer.Option(help=field.description, min=minimum, show_default=False)
    annotation: Any = Annotated[_without_none(field.annotation) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _without_none(annotation: Any) -> Any:
    """Return `X` for `X | None`."""
    members = get_args(annotation)
    return next(member for member in members if member is not NoneType) if NoneType in members else annotation
