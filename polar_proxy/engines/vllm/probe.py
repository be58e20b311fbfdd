"""Find out by test requests what a vLLM server can really do, before any of its answers is recorded.

Servers silently accept unknown fields, so only what was seen in an answer counts as supported. A probe sends
about two dozen requests that sample one to four tokens each. `parser_proof.py` sends further requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from polar_proxy.engines.base import CannotContinueError
from polar_proxy.engines.hermes import END_THINK
from polar_proxy.engines.logprobs import logprob_mode
from polar_proxy.engines.openai_stream import MISSING_BELOW, version_runs
from polar_proxy.engines.vllm.client import CHAT, COMPLETIONS, VllmClient, unless_refused
from polar_proxy.engines.vllm.forced_sampling import adds_grammar
from polar_proxy.engines.vllm.parser_process import ParserProcess, Parsers
from polar_proxy.engines.vllm.parser_proof import REMEDY, ParserProofs
from polar_proxy.engines.vllm.target_answers import ARGUMENTS, TOOL, USER, call_turn
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import EngineInfo, Json, LogprobMode

REFUSED = "Recording for training is refused."
_END_CANDIDATES = 12
"""To find the end-of-turn token, at most this many tokens after a message are tried."""
_CALL: Json = {"id": "polarcal1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}}
_CANONICAL: list[Json] = [
    {"role": "system", "content": "You are terse."},
    *USER,
    {"role": "assistant", "content": "Wait.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "polarcal1", "content": "1 2 3"},
    {"role": "assistant", "content": "One, two, three."},
    {"role": "user", "content": "Again."},
]
_WITH_REASONING: list[Json] = [
    *USER,
    {"role": "assistant", "content": "One.", "reasoning": "Slowly.", "reasoning_content": "Slowly."},
    {"role": "user", "content": "On."},
]
_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
# A server may take sampling defaults from the model's generation config; the probe must not depend on them.
_NEUTRAL: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class VerifiedServer:
    info: EngineInfo
    renders: bool
    """True if `VllmClient.render` returned exactly the prompt ids of the chat route."""
    weight_version: str | None
    """The policy version; None if the server does not report it."""
    parsers: ParserProofs | CannotContinueError
    """How answers that are sampled from exact ids are parsed, or why this is impossible."""
    adds_grammar: bool
    """True if a test showed that the chat route adds a grammar of its own to requests with tools."""
    model_path: str
    """The model's folder, if the user gave a folder. Otherwise the folder or Hub name that the server reports."""


class ServerProbe:
    """Verifies one server, and owns the side process. If the user named no model, the probe sets the client's model."""

    def __init__(
        self, client: VllmClient, vllm_python: str | None, parsers: Parsers | None, model_folder: str | None
    ) -> None:
        """`vllm_python`: the Python of an environment with vLLM. The parsers of this vLLM are tried on the server's
        answers. `parsers`: the parsers that the server was started with, if they are known. `model_folder`: the folder
        of the model's files on this machine."""
        self._model_folder = model_folder
        self._parsers = parsers
        self._client = client
        self._vllm_python = vllm_python
        self._process: ParserProcess | None = None
        self._render_problem = ""
        self._model_path = client.model
        self._adds_grammar = False
        self._any_token = 0
        """Id of an ordinary token: the first that the server sampled."""

    async def run(self) -> VerifiedServer:
        """Verify the server. Raises EngineError, with the remedy, if its answers cannot be recorded for training."""
        context_length = await self._find_model()
        if self._vllm_python is not None:
            self._process = ParserProcess(self._vllm_python, self._model_path)
        reported = await unless_refused(self._client.json("GET", "/version"))
        version = str(reported.get("version", "unknown")) if isinstance(reported, dict) else "unknown"
        problem = await self._missing_evidence()
        if problem is not None:
            raise EngineError(f"{self._client.name} (version {version}) {problem} {REFUSED}")
        mode, tools, required, schema = await asyncio.gather(
            self._logprob_mode(),
            self._accepts(tools=[TOOL], tool_choice="auto"),
            self._accepts(tools=[TOOL], tool_choice="required"),
            self._accepts_schema(),
        )
        token_prompt, scores, weight_version, token_versions, precision = await asyncio.gather(
            self._accepts_token_prompt(),
            unless_refused(self._client.score([self._any_token] * 3)),
            unless_refused(self._client.weight_version()),
            self._reports_token_versions(),
            self._precision(),
        )
        renders = await self._find_renderer(tools=tools)
        self._adds_grammar = tools and await adds_grammar(self._client, renders=renders)
        end_of_turn = await self._end_of_turn() if renders else None
        parsers = await self._prove_parsers(renders, token_prompt, end_of_turn, tools=tools)
        if tools and isinstance(parsers, ParserProofs):
            required = required and await parsers.enforces_calls()
        capabilities = {
            "token_ids": True,
            "logprobs": True,
            "tools": tools,
            "tool_choice_required": required,
            "json_schema": schema,
            "token_prompt": token_prompt,
            "score": scores is not None,
            "continue": isinstance(parsers, ParserProofs),
            "weight_versions": token_versions,
            "single_calls": tools and renders and await self._refuses_two_calls(),
        }
        info = EngineInfo(
            engine="vllm",
            version=version,
            model=self._client.model,
            context_length=context_length,
            template_hash=await self._template_hash(renders),
            logprob_mode=mode,
            capabilities=frozenset(name for name, able in capabilities.items() if able),
            eos_token_ids=() if end_of_turn is None else (end_of_turn,),
            precision=precision,
        )
        return VerifiedServer(info, renders, weight_version, parsers, self._adds_grammar, self._model_path)

    async def close(self) -> None:
        """Stop the side process, if it runs."""
        if self._process is not None:
            await self._process.stop()

    async def _prove_parsers(
        self, renders: bool, token_prompt: bool, end_of_turn: int | None, *, tools: bool
    ) -> ParserProofs | CannotContinueError:
        if not renders:
            problem = "its `/tokenize` does not render conversations as its chat route does."
            return CannotContinueError(f"{problem} {self._render_problem}")
        if not token_prompt:
            return CannotContinueError("it does not return token ids and log-probabilities if the prompt is token ids.")
        if end_of_turn is None:
            return CannotContinueError("no token ends the turns of its chat template and also makes the server stop.")
        proofs = ParserProofs(
            self._client,
            end_of_turn=end_of_turn,
            tools=tools,
            process=self._process,
            parsers=self._parsers,
            adds_grammar=self._adds_grammar,
        )
        try:
            await proofs.prove({})
        except CannotContinueError as error:
            self._adds_grammar = proofs.adds_grammar
            if self._client.renderer is None:
                await self.close()
            return error
        return proofs

    async def _find_model(self) -> int:
        """Check or choose the model, and return its context length."""
        answer = await self._client.json("GET", "/v1/models")
        served = {str(row["id"]): row for row in answer.get("data", []) if "id" in row}
        names = ", ".join(sorted(served)) or "none"
        if not self._client.model:
            if len(served) != 1:
                raise EngineError(f"{self._client.name} serves {len(served)} models: name one of {names}.")
            self._client.model = next(iter(served))
        if self._client.model not in served:
            raise EngineError(f"{self._client.name} does not serve {self._client.model!r}. It serves: {names}.")
        self._model_path = self._model_folder or str(served[self._client.model].get("root") or self._client.model)
        length = served[self._client.model].get("max_model_len")
        if length is None:
            raise EngineError(f"{self._client.name} does not report its context length. Is it a vLLM server? {REFUSED}")
        return int(length)

    async def _chat(self, **fields: Any) -> Json:
        return await self._client.chat({"messages": USER, "max_tokens": 1, **fields})

    async def _accepts(self, **fields: Any) -> bool:
        return await unless_refused(self._chat(**fields)) is not None

    async def _accepts_schema(self) -> bool:
        """Return whether a chat with a JSON schema is accepted.

        vLLM applies a grammar only after the reasoning. If the model ends its reasoning with a token that the grammar
        forbids (the tag of a tool call), the request fails with 500. So a bias makes the model write `</think>`.
        """
        ids = await unless_refused(self._client.encode(END_THINK)) or []
        bias = {"logit_bias": {str(ids[0]): 100}} if len(ids) == 1 else {}
        return await self._accepts(response_format=_SCHEMA, **bias)

    async def _missing_evidence(self) -> str | None:
        """Return None if the server's answers have complete token ids and log-probabilities.

        Otherwise return a description of the fault, with the remedy if Polar knows one.
        """
        body: Json = {"max_tokens": 4, "logprobs": True, "return_token_ids": True}
        try:
            whole = await self._chat(**body, return_tokens_as_token_ids=True)
        except RequestError as error:
            return f"refuses log-probabilities: {error} Start vLLM without --max-logprobs 0."
        choice = whole["choices"][0]
        ids = choice.get("token_ids")
        if not ids or not whole.get("prompt_token_ids"):
            return (
                "does not return token ids for `return_token_ids: true`. vLLM does from 0.10.2 on: update it, or, if "
                "another proxy is in between, give the URL of vLLM itself."
            )
        entries = (choice.get("logprobs") or {}).get("content")
        if not entries:
            return "does not return log-probabilities for `logprobs: true`. Start vLLM without --max-logprobs 0."
        self._any_token = int(ids[0])
        named = [str(entry["token"]).removeprefix("token_id:") for entry in entries]
        if named != [str(token) for token in ids]:
            return f"returned {len(ids)} token ids, and {len(entries)} log-probabilities of other tokens."
        if any(entry["logprob"] <= MISSING_BELOW for entry in entries):
            return "returned -9999 in place of log-probabilities of sampled tokens."
        events = await self._client.sampled(CHAT, {"messages": USER, **body})
        logprobs = [value for event in events for value in event.logprobs]
        if not events or not events[0].prompt_ids or not logprobs or any(map(math.isnan, logprobs)):
            return (
                "returns token ids and log-probabilities in whole answers but loses them in streamed ones. If another "
                "proxy is in between, give the URL of vLLM itself."
            )
        return None

    async def _logprob_mode(self) -> LogprobMode:
        rows = []
        for temperature in (1.0, 2.0):
            fields = {**_NEUTRAL, "temperature": temperature, "logprobs": True, "top_logprobs": 5}
            answer = await self._chat(**fields, return_tokens_as_token_ids=True)
            entry = answer["choices"][0]["logprobs"]["content"][0]
            rows.append({other["token"]: float(other["logprob"]) for other in entry["top_logprobs"]})
        try:
            return logprob_mode(*rows)
        except ValueError as error:
            remedy = "Start vLLM with --logprobs-mode raw_logprobs."
            raise EngineError(f"{self._client.name} {error} {remedy} {REFUSED}") from error

    async def _accepts_token_prompt(self) -> bool:
        prompt = [self._any_token] * 3
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
        answer = await unless_refused(self._client.json("POST", COMPLETIONS, body)) or {}
        choice = (answer.get("choices") or [{}])[0]
        reported = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return choice.get("prompt_token_ids") == prompt and len(choice.get("token_ids") or []) == len(reported) == 1

    async def _precision(self) -> str | None:
        """Return the number formats that `/server_info` reports, if any. The route exists in development mode only."""
        answer = await unless_refused(self._client.json("GET", "/server_info"))
        return read_precision(str(answer.get("vllm_config"))) if isinstance(answer, dict) else None

    async def _reports_token_versions(self) -> bool:
        answer = await self._chat(return_token_ids=True, return_weight_versions=True)
        try:
            return version_runs(answer["choices"][0].get("weight_versions") or ()) != ()
        except (KeyError, TypeError):
            return False

    # The chat template, seen through the server's routes

    async def _render(self, messages: list[Json], **fields: Any) -> list[int]:
        return await self._client.render({"messages": messages, "add_generation_prompt": True, **fields})

    async def _find_renderer(self, *, tools: bool) -> bool:
        """Return whether Polar can get the chat route's prompt ids without sampling.

        `/tokenize` renders with the model's template. The chat route of some models does not (gpt-oss: the library
        openai-harmony). In that case, try vLLM's own renderer in the side process, and make it the client's renderer if
        it gives the ids of the chat route.
        """
        if await self._renders(tools=tools):
            return True
        if self._process is None:
            self._render_problem = REMEDY
            return False
        try:
            await self._process.ensure_started()
        except EngineError as error:
            self._render_problem = str(error)
            return False
        self._client.renderer = self._process
        if await self._renders(tools=tools):
            return True
        self._client.renderer = None
        await self._process.stop()
        self._render_problem = f"Nor does the renderer of vLLM {self._process.version} on this machine."
        return False

    async def _renders(self, *, tools: bool) -> bool:
        """Return whether `VllmClient.render` gives the same prompt ids as the chat route for all test conversations.

        A conversation that both routes refuse counts as equal, except `USER`, which must be rendered.
        """

        async def equal(messages: list[Json], **fields: Any) -> bool:
            rendered = await unless_refused(self._render(messages, **fields))
            answer = await unless_refused(self._chat(messages=messages, return_token_ids=True, **fields)) or {}
            return rendered == answer.get("prompt_token_ids") and (rendered is not None or messages is not USER)

        with_tools = {"tools": [TOOL]} if tools else {}
        forms = [equal(USER), equal(USER, **with_tools), equal(_WITH_REASONING), equal(_CANONICAL, **with_tools)]
        return all(await asyncio.gather(*forms))

    async def _refuses_two_calls(self) -> bool:
        one, two = await asyncio.gather(
            *(
                unless_refused(self._render([*USER, call_turn(calls)], add_generation_prompt=False, tools=[TOOL]))
                for calls in (ARGUMENTS[:1], ARGUMENTS)
            )
        )
        return one is not None and two is None

    async def _template_hash(self, renders: bool) -> str | None:
        """Return `render:` and a hash of the ids of a canonical conversation, because a server does not show its
        template.

        The hash changes with the template and with the tokenizer. For a template that refuses a part of the
        conversation (a system message, tools), the hash covers the part that it accepts.
        """
        for messages, fields in ((_CANONICAL, {"tools": [TOOL]}), (_CANONICAL[-2:], {}), (USER, {})):
            if renders:
                ids = await unless_refused(self._render(messages, **fields))
            else:
                chat = self._chat(messages=messages, return_token_ids=True, **fields)
                ids = (await unless_refused(chat) or {}).get("prompt_token_ids")
            if ids is None:
                continue
            return "render:" + hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:32]
        return None

    async def _end_of_turn(self) -> int | None:
        """Return the id of the token that ends an answer; None if it is not found.

        Candidates are the tokens with which the template closes a message. If the template closes messages without a
        token (GLM), the candidates are the tokens that begin the next message. If the side process renders (as for
        gpt-oss), the candidates are the stop tokens of the model's configuration.

        Some candidates, such as a line break, do not end an answer. So a bias makes the server sample one candidate
        after the other. Return the first at which the server stops by itself.
        """
        for token in await self._end_candidates():
            if await stops_at(self._client, token):
                return token
        return None

    async def _end_candidates(self) -> list[int]:
        if self._client.renderer is not None:
            return self._client.renderer.stop_ids
        turn = [*USER, {"role": "assistant", "content": "One"}]
        closed = await unless_refused(self._render(turn, add_generation_prompt=False))
        unfinished = await unless_refused(self._render(turn, add_generation_prompt=False, continue_final_message=True))
        if closed is None or unfinished is None:
            return []
        pairs = enumerate(zip(closed, unfinished, strict=False))
        same = next((place for place, (one, two) in pairs if one != two), len(unfinished))
        if same == len(closed):
            closed = await unless_refused(self._render([*turn, *USER], add_generation_prompt=False)) or []
        return closed[same : same + _END_CANDIDATES]


async def stops_at(client: VllmClient, token: int) -> bool:
    """Make the server sample a token, by a bias. Return whether the server stops by itself after the token."""
    body = {"messages": USER, "max_tokens": 2, "logit_bias": {str(token): 100}, "return_token_ids": True}
    choice = (await client.chat(body))["choices"][0]
    # The stop reason is the token's id if only the model's generation config makes it an end token.
    stopped_itself = choice.get("stop_reason") in (None, token)
    return choice.get("finish_reason") == "stop" and stopped_itself and choice.get("token_ids") == [token]


def read_precision(description: str) -> str | None:
    """Return the number formats in vLLM's own description of its configuration, such as "bfloat16, fp8 cache"; None if
    the description names no format."""
    fields = dict(re.findall(r"\b(dtype|quantization|kv_cache_dtype)=([^,\s]+)", description))
    if "dtype" not in fields:
        return None
    parts = [fields["dtype"].removeprefix("torch.")]
    if fields.get("quantization", "None") != "None":
        parts.append(f"{fields['quantization']} weights")
    if fields.get("kv_cache_dtype", "auto") != "auto":
        parts.append(f"{fields['kv_cache_dtype']} cache")
    return ", ".join(parts)
