"""What an OpenAI-shaped server can really do, found out by asking it, before anything is recorded from it.

Servers accept fields that they do not know without a word, so nothing is believed that was not seen in an answer.
A full probe is two dozen requests of one to four tokens, and what `probe_parsers.py` asks.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from polar_proxy.engines.hermes import END_THINK
from polar_proxy.engines.openai_client import OpenAIClient, SseDecoder
from polar_proxy.engines.openai_stream import MISSING_BELOW, ChunkDecoder, version_runs
from polar_proxy.engines.vllm.answer_parser import cannot_continue
from polar_proxy.engines.vllm.parser_proof import TOOL, USER, ParserProof, ProvenParsers
from polar_proxy.engines.vllm.probe_template import TemplateProbe
from polar_proxy.engines.vllm.requests import score_body, scores
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import EngineInfo, Json, LogprobMode, Sampling

REFUSED = "Recording for training is refused."
_THOUGHT: list[Json] = [
    *USER,
    {"role": "assistant", "content": "One.", "reasoning": "Slowly.", "reasoning_content": "Slowly."},
    {"role": "user", "content": "On."},
]
_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
# A server may take sampling defaults from the model's own generation config; the probe must not depend on them.
_NEUTRAL: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class VerifiedServer:
    """`tokenize_renders`: `/tokenize` gave the very ids of the chat route. `weight_version`: None where not told.

    `readings`: how answers to exact ids are read, or the refusal that says why they cannot be.
    """

    info: EngineInfo
    tokenize_renders: bool
    weight_version: str | None
    readings: ProvenParsers | RequestError


class ServerProbe:
    """One verification of one server."""

    def __init__(self, http: OpenAIClient, *, model: str | None, require_tokens: bool) -> None:
        self._http = http
        self._model = model or ""
        self._require = require_tokens
        self._who = f"The engine at {http.url}"
        self._any_token = 0
        """Of the vocabulary, and surely no special one: the first that was sampled is good enough."""

    async def run(self) -> VerifiedServer:
        """Raises EngineError with the remedy when the server cannot be recorded from."""
        version = await self._version()
        context_length = await self._find_model()
        self._template = TemplateProbe(self._http, self._model, self._chat)
        problem = await self._missing_evidence()
        if problem is not None:
            if self._require:
                raise EngineError(f"{self._who} (version {version}) {problem} {REFUSED}")
            info = EngineInfo("vllm", version, self._model, context_length, None, "raw", frozenset())
            return VerifiedServer(info, False, None, cannot_continue("it returns no token ids and log-probabilities."))
        mode, tools, required, schema, tokenize = await asyncio.gather(
            self._logprob_mode(),
            self._accepts(tools=[TOOL], tool_choice="auto"),
            self._accepts(tools=[TOOL], tool_choice="required"),
            self._accepts_schema(),
            self._tokenize_renders(),
        )
        ids_prompt, score, weights, versions = await asyncio.gather(
            self._token_prompt(), self._score(), self._weight_version(), self._tells_versions()
        )
        if tools and tokenize:
            tokenize = await self._tokenize_renders(tools=[TOOL])
        if tokenize:
            tokenize = await self._tokenize_renders(_THOUGHT)
        ends = await self._template.end_of_turn() if tokenize else ()
        readings = await self._readings(tokenize, ids_prompt, ends, tools=tools)
        can = {
            "token_ids": True,
            "logprobs": True,
            "tools": tools,
            "tool_choice_required": required,
            "json_schema": schema,
            "token_prompt": ids_prompt,
            "score": score,
            "continue": isinstance(readings, ProvenParsers),
            "weight_versions": versions,
        }
        info = EngineInfo(
            engine="vllm",
            version=version,
            model=self._model,
            context_length=context_length,
            template_hash=await self._template.hash(tokenize),
            logprob_mode=mode,
            capabilities=frozenset(name for name, able in can.items() if able),
            eos_token_ids=ends,
        )
        return VerifiedServer(info, tokenize, weights, readings)

    async def _readings(
        self, tokenize: bool, ids_prompt: bool, ends: tuple[int, ...], *, tools: bool
    ) -> ProvenParsers | RequestError:
        if not tokenize:
            return cannot_continue("its `/tokenize` does not render conversations as its chat route does.")
        if not ids_prompt:
            return cannot_continue("it does not sample from token ids with the evidence that recording needs.")
        if not ends:
            return cannot_continue("no token ends the turns of its template at which it also stops by itself.")
        proof = ParserProof(self._http, self._model, end=ends[0], tools=tools)
        try:
            return ProvenParsers(proof, await proof.prove({}))
        except RequestError as error:
            return error

    async def _version(self) -> str:
        try:
            answer = await self._http.json("GET", "/version")
        except RequestError:
            return "unknown"
        except EngineError as error:
            if "does not have this route" in str(error):
                return "unknown"
            raise
        return str(answer.get("version", "unknown")) if isinstance(answer, dict) else "unknown"

    async def _find_model(self) -> int:
        """Settles the model's name and returns the context length, 0 where the server does not tell it."""
        answer = await self._http.json("GET", "/v1/models")
        served = {str(row["id"]): row for row in answer.get("data", []) if "id" in row}
        names = ", ".join(sorted(served)) or "none"
        if not self._model:
            if len(served) != 1:
                raise EngineError(f"{self._who} serves {len(served)} models: name one of {names}.")
            self._model = next(iter(served))
        if self._model not in served:
            raise EngineError(f"{self._who} does not serve {self._model!r}. It serves: {names}.")
        length = served[self._model].get("max_model_len")
        if length is None and self._require:
            raise EngineError(f"{self._who} does not tell its context length. Is it a vLLM server? {REFUSED}")
        return int(length or 0)

    def _body(self, **more: Any) -> Json:
        return {"model": self._model, "messages": USER, "max_tokens": 1, **more}

    async def _chat(self, **more: Any) -> Json:
        answer = await self._http.json("POST", "/v1/chat/completions", self._body(**more))
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise EngineError(f"{self._who} answered a chat without choices.")
        return answer

    async def _accepts(self, **more: Any) -> bool:
        try:
            await self._chat(**more)
        except (RequestError, EngineError):  # some servers answer 500 to what they do not support
            return False
        return True

    async def _accepts_schema(self) -> bool:
        """vLLM lets reasoning run free before a grammar, and ends a request with 500 where the model ends its reasoning
        with a token that the grammar forbids (a tool call): a bias lets it end with its own tag."""
        bias: Json = {}
        try:
            body = {"model": self._model, "prompt": END_THINK, "add_special_tokens": False}
            ids = (await self._http.json("POST", "/tokenize", body)).get("tokens") or []
            bias = {"logit_bias": {str(ids[0]): 100}} if len(ids) == 1 else {}
        except (RequestError, EngineError):
            pass  # the route is not there: then nothing is steered
        return await self._accepts(response_format=_SCHEMA, **bias)

    async def _missing_evidence(self) -> str | None:
        """What is wrong with the token ids and log-probabilities of an answer, and the remedy; None when nothing is."""
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
                "another proxy stands between, give the URL of vLLM itself."
            )
        entries = (choice.get("logprobs") or {}).get("content")
        if not entries:
            return "does not return log-probabilities for `logprobs: true`. Start vLLM without --max-logprobs 0."
        self._any_token = int(ids[0])
        named = [str(entry["token"]).removeprefix("token_id:") for entry in entries]
        if named != [str(token) for token in ids]:
            return f"returned {len(ids)} token ids that are not those of its {len(entries)} log-probabilities."
        if any(entry["logprob"] <= MISSING_BELOW for entry in entries):
            return "returned -9999 in place of log-probabilities of sampled tokens."
        return await self._stream_missing_evidence(body)

    async def _stream_missing_evidence(self, body: Json) -> str | None:
        parser = ChunkDecoder(Sampling(), self._who)
        decoder = SseDecoder(self._http.url)
        events = []
        response = await self._http.post("/v1/chat/completions", self._body(**body, stream=True))
        try:
            while not decoder.done and (data := await self._http.read_some(response)):
                events += parser.feed(decoder.feed(data))
            events += parser.end()
            await self._http.finish(response)
        finally:
            response.close()
        logprobs = [value for event in events for value in event.logprobs]
        if not events or not events[0].prompt_ids or not logprobs or any(map(math.isnan, logprobs)):
            return (
                "returns token ids and log-probabilities in whole answers but loses them in streamed ones. If another "
                "proxy stands between, give the URL of vLLM itself."
            )
        return None

    async def _logprob_mode(self) -> LogprobMode:
        rows = []
        for temperature in (1.0, 2.0):
            more = {**_NEUTRAL, "temperature": temperature, "logprobs": True, "top_logprobs": 5}
            answer = await self._chat(**more, return_tokens_as_token_ids=True)
            entry = answer["choices"][0]["logprobs"]["content"][0]
            rows.append({other["token"]: float(other["logprob"]) for other in entry["top_logprobs"]})
        try:
            return logprob_mode(*rows)
        except ValueError as error:
            raise EngineError(f"{self._who} {error} {REFUSED}") from error

    async def _token_prompt(self) -> bool:
        prompt = [self._any_token] * 3
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
        try:
            answer = await self._http.json("POST", "/v1/completions", body)
        except (RequestError, EngineError):
            return False
        choice = (answer.get("choices") or [{}])[0]
        reported = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return choice.get("prompt_token_ids") == prompt and len(choice.get("token_ids") or []) == len(reported) == 1

    async def _score(self) -> bool:
        ids = [self._any_token] * 3
        try:
            answer = await self._http.json("POST", "/v1/completions", score_body(self._model, ids))
            return len(scores(ids, answer, self._who)) == 2
        except (RequestError, EngineError):
            return False

    async def _tokenize_renders(self, messages: list[Json] = USER, **more: Any) -> bool:
        try:
            rendered = await self._template.rendered(messages, **more)
        except (RequestError, EngineError):
            return False
        answer = await self._chat(messages=messages, return_token_ids=True, **more)
        return bool(rendered) and rendered == answer.get("prompt_token_ids")

    async def _tells_versions(self) -> bool:
        answer = await self._chat(return_token_ids=True, return_weight_versions=True)
        choice = answer["choices"][0]
        try:
            return version_runs(choice.get("weight_versions") or ()) != ()
        except (KeyError, TypeError):
            return False

    async def _weight_version(self) -> str | None:
        try:
            answer = await self._http.json("GET", "/weight_info")
        except (RequestError, EngineError):
            return None
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return None if version is None else str(version)


def logprob_mode(at_one: dict[str, float], at_two: dict[str, float]) -> LogprobMode:
    """`raw` or `processed`, from the log-probabilities of the same tokens at temperature 1 and at 2.

    log p_a - log p_b is the difference of two logits divided by the temperature that was applied: the gap between two
    tokens stays as it is in raw mode and is halved in processed mode. The widest gap is taken, as it is the least
    noisy. Raises ValueError, to be read behind the server's name, when neither is seen.
    """
    if any(value > 1e-3 for value in at_one.values()) or sum(map(math.exp, at_one.values())) > 1.01:
        raise ValueError("returns logits, not log-probabilities. Start vLLM with --logprobs-mode raw_logprobs.")
    common = [t for t in at_one if t in at_two and min(at_one[t], at_two[t]) > MISSING_BELOW]
    high, low = max(common, key=at_one.__getitem__, default=""), min(common, key=at_one.__getitem__, default="")
    gap = at_one[high] - at_one[low] if common else 0.0
    if gap < 1e-2:
        raise ValueError("gives the likeliest tokens one and the same probability, so that its mode cannot be told.")
    ratio = (at_two[high] - at_two[low]) / gap
    if abs(ratio - 1.0) < 0.15:
        return "raw"
    if abs(ratio - 0.5) < 0.15:
        return "processed"
    raise ValueError(
        f"is neither in raw nor in processed mode: at temperature 2 the gap between two tokens is {ratio:.2f} times "
        "that at temperature 1 (1.0 or 0.5 was expected)."
    )
