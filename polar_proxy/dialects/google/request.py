"""A GenerateContentRequest as a chat request. Source: https://ai.google.dev/api/generate-content"""

from __future__ import annotations

from polar_proxy.dialects.fields import invalid, unsupported
from polar_proxy.dialects.google.contents import parse_contents, parse_system
from polar_proxy.dialects.google.schema import GenerateContentRequest, GenerationConfig
from polar_proxy.dialects.google.tools import json_schema, parse_tool_choice, parse_tools
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Sampling

_CONFIG = "generationConfig"


def to_chat_request(model: str, fields: GenerateContentRequest) -> ChatRequest:
    """Convert a request. Raises RequestError. Safety settings and labels are tolerated: they have no effect here."""
    if fields.cached_content is not None:
        raise unsupported("cachedContent", "send the contents themselves, repeated prefixes are cached anyway")
    if not fields.contents:
        raise RequestError("Missing required parameter: 'contents'.", param="contents", code="empty_array")
    messages = parse_contents(fields.contents)
    if not messages:
        raise RequestError("'contents' contains nothing to answer.", param="contents", code="empty_array")
    system = parse_system(fields.system_instruction)
    tools, tool_choice = parse_tool_choice(fields.tool_config.function_calling_config, parse_tools(fields.tools))
    config = fields.generation_config
    return ChatRequest(
        model=model,
        messages=tuple(messages if system is None else [system, *messages]),
        sampling=_sampling(config),
        tools=tools,
        tool_choice=tool_choice,
        response_format=_response_format(config),
        # Other budgets, and levels, are hints for which open models have no setting.
        template_kwargs={"enable_thinking": False} if config.thinking_config.thinking_budget == 0 else {},
    )


def _sampling(config: GenerationConfig) -> Sampling:
    if config.logprobs and not config.response_logprobs:
        path = f"{_CONFIG}.logprobs"
        raise RequestError(f"'{path}' needs 'responseLogprobs' to be true.", param=path)
    for modality in config.response_modalities:
        if not isinstance(modality, str) or modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise invalid(f"{_CONFIG}.responseModalities", "only TEXT is supported")
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_output_tokens,
        seed=config.seed,
        stop=tuple(stop for stop in config.stop_sequences if stop),
        n=config.candidate_count,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logprobs=config.response_logprobs,
        top_logprobs=config.logprobs,
    )


def _response_format(config: GenerationConfig) -> Json | None:
    """Return the structured output format. A schema without a MIME type means JSON."""
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = json_schema(config.response_schema)
    mime = config.response_mime_type or ("text/plain" if schema is None else "application/json")
    path = f"{_CONFIG}.responseMimeType"
    if mime == "application/json":
        if schema is None:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
    if mime != "text/plain":
        raise invalid(path, "expected text/plain or application/json")
    if schema is not None:
        raise RequestError(f"A response schema needs '{path}' to be application/json.", param=path)
    return None
