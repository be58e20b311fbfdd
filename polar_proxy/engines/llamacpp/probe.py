"""Find out by test requests what a llama-server can really do, before any of its answers is recorded."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polar_proxy.engines.chat_template import ModelTemplate
from polar_proxy.engines.hermes import HermesParser, reasoning_kind
from polar_proxy.engines.llamacpp.client import (
    LlamaCppClient,
    Vocabulary,
    sampling_body,
    stream_fields,
    streamed_token,
)
from polar_proxy.engines.logprobs import ALTERNATIVES, logprob_mode
from polar_proxy.engines.openai_stream import parse_json
from polar_proxy.errors import EngineError, PolarError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, Json, Message, SampleEvent, Sampling, ToolCall

log = logging.getLogger(__name__)

REFUSED = "Recording for training is refused."
_ROOM = 4
_USER = Message("user", "Count to three.")
_ANSWER = "One, two, three."
_CALLS = (ToolCall("polarcal1", "look", '{"path": "a"}'), ToolCall("polarcal2", "look", '{"path": "b \\"c\\" <d>"}'))
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


@dataclass(frozen=True, slots=True)
class LlamaServerModel:
    """The model that a llama-server serves, with the results of probing it."""

    info: EngineInfo
    template_source: str
    template: ModelTemplate | None
    """The model's chat template; None if this process cannot compile it."""
    vocabulary: Vocabulary
    problem: str | None
    """Why Polar cannot parse this model's tool calls; None if it can. If Polar cannot, it refuses requests with tools
    and continues no conversation from exact tokens."""


async def probe_server(client: LlamaCppClient, model: str | None) -> LlamaServerModel:
    """Verify the server and return its model. Raises EngineError, with the remedy, if the server's answers cannot be
    recorded for training."""
    props = await _properties(client)
    name = await _model_name(client, model)
    if not props.get("chat_template"):
        raise EngineError(f"{client.name} has no chat template: start it with --jinja, or with a newer llama.cpp.")
    context = int(props["default_generation_settings"]["n_ctx"])
    source = str(props["chat_template"])
    opened = await client.apply_template(ChatRequest("", (_USER,)))
    prompt = await client.tokenize(opened, add_special=True)
    await _require_same_prompt(client, prompt)
    await _require_evidence(client, prompt)
    await _require_modes(client, prompt)
    ends = await _end_of_turn(client, prompt, opened, str(props.get("eos_token") or ""))
    if not ends:
        raise EngineError(
            f"{client.name} does not stop at the token that its chat template writes after an answer, nor at the "
            f"model's end token. {REFUSED}"
        )
    problem = await _tools_problem(client, source)
    log.info("%s: %s slots of %d tokens", client.name, props.get("total_slots", "?"), context)
    capabilities = {"token_ids", "logprobs", "token_prompt", "score", "continue"}
    info = EngineInfo(
        engine="llamacpp",
        version=str(props.get("build_info") or "unknown"),
        model=name,
        context_length=context,
        template_hash=hashlib.sha256(source.encode()).hexdigest(),
        logprob_mode="processed",
        capabilities=frozenset(capabilities | (set() if problem else {"tools"})),
        eos_token_ids=ends,
        precision=props.get("model_ftype"),
    )
    vocabulary = Vocabulary(await client.next_tokens(prompt, ends[0]))
    return LlamaServerModel(info, source, _compiled(source, props), vocabulary, problem)


async def _properties(client: LlamaCppClient) -> Json:
    """Return `/props`. Raises EngineError if this is not a llama-server, or it has not loaded its model yet."""
    response = await client.send("GET", "/props")
    if response.status == 503:
        raise EngineError(f"{client.name} has not loaded its model yet: wait until GET /health answers 200.")
    if response.status == 200:
        props = parse_json(await client.read(response), client.url)
        if isinstance(props, dict) and "default_generation_settings" in props:
            return props
        raise EngineError(f"{client.name} is not a llama-server: its /props lacks the generation settings.")
    failure = await client.failure(response)
    if response.status in (401, 403):
        raise failure
    try:
        ollama = await client.json("GET", "/api/version")
    except PolarError:
        raise EngineError(f"{client.name} is not a llama-server: it has no /props ({failure}).") from failure
    raise EngineError(
        f"{client.name} is Ollama {ollama.get('version', '')}, whose API returns no token ids, so its answers cannot "
        f"be trained on. Start llama-server with the same GGUF file, or record text only: --engine openai --engine-url "
        f"{client.url}/v1 --model NAME."
    )


async def _model_name(client: LlamaCppClient, wanted: str | None) -> str:
    served = [str(row["id"]) for row in client.field(await client.json("GET", "/v1/models"), "data")]
    if len(served) != 1:
        raise EngineError(f"{client.name} serves {len(served)} models: start a llama-server with one model (-m FILE).")
    if wanted not in (None, served[0]):
        raise EngineError(f"{client.name} does not serve {wanted!r}. It serves: {served[0]}.")
    return served[0]


async def _require_same_prompt(client: LlamaCppClient, prompt: Sequence[int]) -> None:
    """Raise EngineError if the chat route makes a prompt of another length than `prompt` from the same messages.

    `prompt`: token ids from /apply-template and /tokenize.
    """
    body = {"messages": [_USER.to_openai()], "max_tokens": 1}
    usage = client.field(await client.json("POST", "/v1/chat/completions", body), "usage")
    if usage.get("prompt_tokens") != len(prompt):
        raise EngineError(
            f"{client.name} gives the chat route a prompt of {usage.get('prompt_tokens')} tokens, but its "
            f"/apply-template and /tokenize give {len(prompt)}. {REFUSED}"
        )


async def _require_evidence(client: LlamaCppClient, prompt: Sequence[int]) -> None:
    """Raise EngineError if a streamed answer lacks token ids or log-probabilities, or if the server sampled it with
    other settings than the request's."""
    sent = sampling_body(Sampling(max_tokens=_ROOM), seed=1, context=_ROOM, room=_ROOM)
    chunks = [chunk async for chunk in client.chunks({**stream_fields(prompt), **sent})]
    if not any(chunk.get("tokens") for chunk in chunks):
        raise EngineError(
            f"{client.name} returns no token ids for `return_tokens: true`. Update llama.cpp; if another proxy is in "
            f"between, give the URL of llama-server itself. {REFUSED}"
        )
    tokens = [streamed_token(chunk, 0, client.name) for chunk in chunks]
    if any(token is not None and math.isnan(token.logprob) for token in tokens):
        raise EngineError(
            f"{client.name} returns tokens without their log-probabilities, as it does with speculative decoding. "
            f"Start the server without a draft model. {REFUSED}"
        )
    used = client.field(chunks[-1], "generation_settings")
    ignored = [
        name for name in ("samplers", "mirostat", "n_probs", "post_sampling_probs") if used.get(name) != sent[name]
    ]
    if ignored:
        raise EngineError(
            f"{client.name} ignores the settings {', '.join(ignored)} of a request: update llama.cpp. {REFUSED}"
        )


async def _require_modes(client: LlamaCppClient, prompt: Sequence[int]) -> None:
    """Raise EngineError if `post_sampling_probs` does not choose between raw and processed log-probabilities."""
    for post, expected in ((True, "processed"), (False, "raw")):
        rows = []
        for temperature in (1.0, 2.0):
            sampling = Sampling(temperature=temperature, max_tokens=1, top_logprobs=ALTERNATIVES)
            body = sampling_body(sampling, seed=1, context=_ROOM, room=_ROOM) | {"post_sampling_probs": post}
            chunks = [chunk async for chunk in client.chunks({**stream_fields(prompt), **body})]
            token = streamed_token(chunks[0], ALTERNATIVES, client.name)
            rows.append({str(other.token_id): other.logprob for other in token.top} if token else {})
        try:
            found = logprob_mode(*rows)
        except ValueError as error:
            raise EngineError(f"{client.name} {error} {REFUSED}") from error
        if found != expected:
            raise EngineError(
                f"{client.name} returns {found} log-probabilities for `post_sampling_probs: {str(post).lower()}`, "
                f"but should return {expected} log-probabilities: update llama.cpp. {REFUSED}"
            )


async def _end_of_turn(client: LlamaCppClient, prompt: Sequence[int], opened: str, end: str) -> tuple[int, ...]:
    """Return the tokens that end an answer. Candidates are the token that the template writes after an answer, and the
    model's end token, whose text is `end`. A candidate at which the server does not stop is left out."""
    whole = await client.apply_template(ChatRequest("", (_USER, Message("assistant", _ANSWER), _USER)))
    candidates = [end]
    if _ANSWER in whole:
        candidates.insert(0, whole.rpartition(_ANSWER)[2])
    found: list[int] = []
    for text in filter(None, candidates):
        token = (await client.tokenize(text))[0]
        if token not in found and (await client.forced(prompt, token)).get("stop_type") == "eos":
            found.append(token)
    return tuple(found)


async def _tools_problem(client: LlamaCppClient, source: str) -> str | None:
    """Return why Polar cannot parse tool calls as the model's template writes them; None if it can."""
    request = ChatRequest("", (_USER,), tools=(_TOOL,))
    after = (Message("tool", "1", tool_call_id="polarcal1"), Message("tool", "2", tool_call_id="polarcal2"))
    try:
        opened = await client.apply_template(request)
        turn = Message("assistant", "I look.", tool_calls=_CALLS)
        whole = await client.apply_template(replace(request, messages=(_USER, turn, *after)))
    except RequestError as error:
        return f"its chat template refuses tools: {error}"
    written = whole.removeprefix(opened)
    answer = written[: written.rindex("</tool_call>") + len("</tool_call>")] if "</tool_call>" in written else written
    parser = HermesParser(tools=True, reasoning=reasoning_kind(source, opened))
    read = parser.parse(SampleEvent(text=answer, finish_reason="stop"))
    calls = [(call.name, json.loads(call.arguments)) for call in read.tool_calls]
    if [(call.name, json.loads(call.arguments)) for call in _CALLS] != calls:
        return (
            "its chat template writes tool calls in another format than Hermes (<tool_call>{...}</tool_call>). Serve "
            "the model with vLLM, whose parsers Polar can use, or record text only with --engine openai."
        )
    return None


def _compiled(source: str, props: Json) -> ModelTemplate | None:
    special = {name: props[name] for name in ("bos_token", "eos_token") if props.get(name) is not None}
    try:
        return ModelTemplate(source, special)
    except PolarError:
        return None
