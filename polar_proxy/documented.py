"""Pydantic models whose fields are described by docstrings: the string literal below each field.

The texts are read from the source when they are needed: for `--help`, the OpenAPI document and the reference.
Pydantic's `use_attribute_docstrings` is not used: it reads the source of every model at import, which takes a tenth of
the time of a short command.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class DocumentedModel(BaseModel):
    """A model whose JSON Schema takes the description of each field from the docstring below it."""

    # Validators are built at their first use, because a command uses few of the models.
    model_config = ConfigDict(defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_descriptions(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return schema


@cache
def field_descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstring of each field of a model, by the field's name. Fields without a docstring are left out."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base is not BaseModel and issubclass(base, BaseModel):
            found |= _texts_below_fields(base)
    return {name: text for name, text in found.items() if name in model.model_fields}


def _texts_below_fields(model: type[BaseModel]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        match below:
            case ast.Expr(ast.Constant(str() as text)):
                found[field.target.id] = inspect.cleandoc(text)
    return found
