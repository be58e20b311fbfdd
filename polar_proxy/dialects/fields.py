"""Request fields as pydantic models, content parts, and the errors that name a wrong field.

Promises: JSON null counts as absent; unknown fields are ignored; 1.0 is an integer, while true and "1" are not; an
error names the first wrong field by its path in the body (`messages[0].role`) and says what was expected.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from polar_proxy.errors import RequestError
from polar_proxy.types import Json

_EXPECTED = {
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_strings(value: list[Any]) -> list[str]:
    if not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("array_of_strings", "an array of strings")
    return value


def positive_or_none(value: int) -> int | None:
    """Return a value of `top_k`; None for 0 and -1, which turn `top_k` off."""
    return value if value > 0 else None


Integer = Annotated[int, BeforeValidator(_integral), Field(ge=-(2**63), le=2**63 - 1)]
TopK = Annotated[int, BeforeValidator(_integral), Field(ge=-1, le=2**31 - 1), AfterValidator(positive_or_none)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]
Strings = Annotated[list[Any], AfterValidator(_all_strings)]
"""An array of strings; an error names the array, not the item."""


class RequestFields(BaseModel):
    """Base of the models that validate fields of a body."""

    # Validators are built at their first use: an export imports the models of all dialects.
    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {key: item for key, item in value.items() if item is not None}

    @classmethod
    def read(cls, value: object, path: str = "") -> Self:
        """Validate `value`, which is at `path` in the body. Raises RequestError."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise _first_error(error, path) from None


def _first_error(error: ValidationError, parent: str) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    path = (parent + "".join(steps)).removeprefix(".")
    kind, bounds = first["type"], first.get("ctx", {})
    if kind == "missing":
        return missing(path)
    if kind == "greater_than_equal":
        return invalid(path, f"it must be at least {bounds['ge']:g}")
    if kind == "less_than_equal":
        return invalid(path, f"it must be at most {bounds['le']:g}")
    return invalid_type(path, _EXPECTED.get(kind) or first["msg"])


def invalid_type(path: str, expected: str) -> RequestError:
    return RequestError(f"Invalid type for '{path}': expected {expected}.", param=path, code="invalid_type")


def invalid(path: str, problem: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"Invalid value for '{path}': {problem}.", param=path, code=code)


def missing(path: str) -> RequestError:
    return RequestError(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")


def unsupported(path: str, advice: str = "") -> RequestError:
    text = f"'{path}' is not supported here{': ' + advice if advice else ''}."
    return RequestError(text, param=path, code="unsupported_parameter")


def string_field(item: Json, key: str, path: str) -> str:
    """Return a required string of `item`, which is at `path` in the body."""
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid_type(f"{path}.{key}", "a string")
    return value


def optional_string(item: Json, key: str) -> str | None:
    """Return a string of `item`; None for a value of another type."""
    value = item.get(key)
    return value if isinstance(value, str) else None


def other_fields(params: Json, known: type[BaseModel], *read: str) -> Json:
    """Return the remaining fields of a body: those that are not null, not in the model `known` and not in `read`."""
    names = {field.alias or name for name, field in known.model_fields.items()}
    return {key: value for key, value in params.items() if value is not None and key not in names and key not in read}


def function_tool(name: str, description: object, parameters: Json | None) -> Json:
    """Return the definition of a function tool in the form of OpenAI's Chat Completions API."""
    function: Json = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": function}


def object_schema(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required}


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def as_content(parts: list[Json]) -> str | list[Json]:
    """Return OpenAI content parts as the content of a message: a single text part as a string, else the list."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts
