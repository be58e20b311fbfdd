"""The types of Google's API that Polar reads. Source: https://ai.google.dev/api/generate-content and /api/caching

Names are Google's. Proto JSON accepts every field in camelCase and in snake_case, 64-bit integers as strings, and a
single object where a list of objects is meant; Google's own examples use all three. Errors name fields in camelCase.
Source: https://protobuf.dev/programming-guides/json/
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from polar_proxy.dialects.fields import Penalty, Probability, RequestFields, Strings, Temperature, positive_or_none
from polar_proxy.types import Json

T = TypeVar("T")

_WORD = re.compile("_([a-z])")
_DIGITS = re.compile("-?[0-9]{1,18}")


@lru_cache(maxsize=256)
def camel_case(name: str) -> str:
    """Return `function_call` as `functionCall`."""
    return _WORD.sub(lambda found: found[1].upper(), name)


def _integer(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, dict) else value


Int64 = Annotated[int, BeforeValidator(_integer), Field(ge=-(2**63), le=2**63 - 1)]
Repeated = Annotated[list[T], BeforeValidator(_as_list), Field(default_factory=list)]


class GoogleFields(RequestFields):
    """Base of Google's types. Attributes are in snake_case."""

    model_config = ConfigDict(alias_generator=to_camel)

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: Any) -> Any:
        """Drop the fields that are null, and spell the others in camelCase."""
        if not isinstance(value, dict) or not ("_" in "".join(value) or None in value.values()):
            return value
        return {camel_case(key): item for key, item in value.items() if item is not None}


class FunctionCall(GoogleFields):
    id: str = ""
    name: str = ""
    args: Json = Field(default_factory=dict)


class Blob(GoogleFields):
    mime_type: str = ""
    data: str = ""


class FileData(GoogleFields):
    mime_type: str = ""
    file_uri: str = ""


class ExecutableCode(GoogleFields):
    language: str = ""
    code: str = ""


class CodeExecutionResult(GoogleFields):
    output: str = ""


class Part(GoogleFields):
    """One part of a content. At most one of the data fields is set. Unknown fields are in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    text: str | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None


class FunctionResponse(GoogleFields):
    id: str = ""
    name: str = ""
    response: Json | None = None
    parts: Repeated[Part]


class Content(GoogleFields):
    role: str = ""
    parts: Repeated[Part]


class FunctionDeclaration(GoogleFields):
    name: str = ""
    description: str | None = None
    parameters: Json | None = None
    parameters_json_schema: Json | None = None


class Tool(GoogleFields):
    function_declarations: Repeated[FunctionDeclaration]


class FunctionCallingConfig(GoogleFields):
    mode: str | None = None
    allowed_function_names: Strings = Field(default_factory=list)


class ToolConfig(GoogleFields):
    function_calling_config: FunctionCallingConfig = Field(default_factory=FunctionCallingConfig)


class ThinkingConfig(GoogleFields):
    include_thoughts: bool = False
    thinking_budget: Annotated[Int64, Field(ge=-1)] | None = None


class GenerationConfig(GoogleFields):
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[Int64, Field(ge=-1, le=2**31 - 1), AfterValidator(positive_or_none)] | None = None
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = None
    stop_sequences: Strings = Field(default_factory=list)
    candidate_count: Annotated[Int64, Field(ge=1, le=128)] = 1
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_logprobs: bool = False
    logprobs: Annotated[Int64, Field(ge=0, le=20)] = 0
    response_mime_type: str = ""
    response_schema: Json | None = None
    response_json_schema: Json | None = None
    response_modalities: list[Any] = Field(default_factory=list)
    thinking_config: ThinkingConfig = Field(default_factory=ThinkingConfig)


class GenerateContentRequest(GoogleFields):
    contents: Repeated[Content]
    system_instruction: Any = None
    tools: Repeated[Tool]
    tool_config: ToolConfig = Field(default_factory=ToolConfig)
    generation_config: GenerationConfig = Field(default_factory=GenerationConfig)
    cached_content: Any = None


class CountTokensRequest(GoogleFields):
    generate_content_request: Json | None = None
