"""Functions of the user's, named ``module:function`` in a task."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from polar_proxy.tasks.task import BadTaskError


def load_function(name: str) -> Callable[..., Any]:
    """The function called ``module:function``. Raises `BadTaskError`."""
    module, separator, function = name.partition(":")
    if not separator:
        raise BadTaskError(f"{name!r} must be module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise BadTaskError(f"cannot load {name}: {error}") from error
    if not callable(found):
        raise BadTaskError(f"{name} is no function")
    return found  # type: ignore[no-any-return]
