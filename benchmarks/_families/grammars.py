"""Which answers does vLLM sample under a grammar, and does Polar record exactly these as constrained?

For each family, and for each kind of request that may add a grammar, a session of two calls on a real vLLM: the first
is rendered by the chat route, the second is continued from exact ids. Both times the model is made to call a tool in
the template's own form. The same requests are also sent to vLLM's chat route directly.

A grammar shows in the log-probabilities: they leave out what it forbids, so they differ from those that vLLM gives for
the same ids in a prompt. If a grammar forbids the template's own form, vLLM answers with an error.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from benchmarks._families.families import Family, load_families
from benchmarks._families.planned_session import TOOLS, Agent, ask
from benchmarks._families.random_models import save_model
from benchmarks._families.real import FamilyEngine, ServerError, make_renderer, serve_vllm
from benchmarks._families.served_families import ServedFamily
from polar_proxy.config import GatewaySettings
from polar_proxy.conformance.runner import temporary_store
from polar_proxy.engines.base import CannotContinueError
from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.errors import PolarError
from polar_proxy.gateway import Gateway
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, EngineRequest, Json, ToolCall

_TOLERANCE = 1e-3
"""Largest difference, in nats, of two log-probabilities that count as equal."""
_STRICT: Json = {
    "tools": [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
}
REQUESTS: dict[str, Json] = {
    "tools": {},
    "one call": {"parallel_tool_calls": False},
    "strict": _STRICT,
    "strict, one call": {**_STRICT, "parallel_tool_calls": False},
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "look"}}},
}
"""Name of a kind of request -> fields that are added to a request with tools, whose default is `tool_choice: auto`."""

Sampled = Literal["free", "grammar", "refused"]
"""`refused`: vLLM's grammar forbids the form in which the template writes a call."""


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """One kind of request of one family."""

    family: str
    request: str
    chat_route: Sampled
    """How vLLM's chat route samples the answer if the request is sent to it directly."""
    calls: tuple[tuple[str, Sampled, bool], ...]
    """The recorded calls: prompt mode, how the answer was sampled, and whether it was recorded as constrained."""

    @property
    def right(self) -> bool:
        """Whether exactly the answers that were sampled under a grammar were recorded as constrained."""
        return all(
            (sampled == "grammar") == constrained for _, sampled, constrained in self.calls if sampled != "refused"
        )


@dataclass(slots=True)
class GrammarResult:
    family: str
    found: str = ""
    """How Polar parses answers."""
    problem: str | None = None
    """Why the family could not be measured."""
    rows: list[GrammarRow] = field(default_factory=list)


def _call_tool(request: EngineRequest) -> ScriptedReply:
    return ScriptedReply(calls=(ToolCall("polar0001", "look", '{"path": "a.txt"}'),))


async def run_grammars(wanted: Sequence[ServedFamily]) -> AsyncIterator[GrammarResult]:
    """Measure families one after another."""
    families = {family.name: family for family in load_families()}
    for served in wanted:
        yield await run_family(served, families[served.template])


async def run_family(served: ServedFamily, family: Family) -> GrammarResult:
    """Measure one family. Never fails: `problem` of the result says what went wrong."""
    out = GrammarResult(served.name)
    renderer = make_renderer(served, family)
    with tempfile.TemporaryDirectory(prefix="polar-family-") as folder:
        save_model(Path(folder), renderer, served.architecture)
        try:
            async with (
                serve_vllm(Path(folder), served.name, *served.flags) as url,
                FamilyEngine(url, served, renderer, _call_tool) as engine,
                temporary_store() as store,
                Gateway(engine, store, GatewaySettings(host="127.0.0.1", port=0, require_known_keys=True)) as gateway,
            ):
                try:
                    out.found = await engine.parsing(served.options)
                except CannotContinueError:
                    out.found = "not continued"
                for request in REQUESTS:
                    out.rows.append(await measure(served, engine, store, gateway.url, request))
        except (PolarError, httpx.HTTPError, ServerError) as error:
            out.problem = f"{type(error).__name__}: {error}"
    return out


async def measure(served: ServedFamily, engine: FamilyEngine, store: Store, gateway: str, request: str) -> GrammarRow:
    """Play one session of two calls, and send its first request to vLLM directly."""
    key = new_key()
    session = await store.sessions.create(key_hash=hash_key(key), label=None, policy=None, origin="key")
    agent = Agent(dict(served.options), stream=True, keeps_reasoning=True)
    headers = {"authorization": f"Bearer {key}"}
    first: Json | None = None
    refused = False
    async with httpx.AsyncClient(base_url=gateway + "/v1", headers=headers, timeout=120) as http:
        for said in ("Read a.txt.", ""):
            body = agent.body(said) | REQUESTS[request]
            first = first or {**body, "messages": list(body["messages"])}
            try:
                agent.add(await ask(http, body))
            except httpx.HTTPStatusError:
                refused = True
                break
    assert first is not None
    calls = [await _seen(engine, call) for call in await store.calls.of_session(session.session_id)]
    assert refused or len(calls) == 2
    return GrammarRow(served.name, request, await _direct(engine, first), tuple(calls))


async def _seen(engine: FamilyEngine, call: CallRecord) -> tuple[str, Sampled, bool]:
    constrained = bool(call.sampling.get("constrained"))
    if call.status != "ok" or call.prompt_ids is None:
        return call.prompt_mode, "refused", constrained
    choice = call.choices[0]
    sampled = await _sampled(engine, call.prompt_ids.tolist(), choice.token_ids.tolist(), choice.logprobs.tolist())
    return call.prompt_mode, sampled, constrained


async def _direct(engine: FamilyEngine, body: Json) -> Sampled:
    """Return how vLLM's chat route samples the answer to this request."""
    forced = {"vllm_xargs": {"forced_ids": list(engine.ids[0])}, "model": engine.info.model}
    wanted = {"stream": False, "logprobs": True, "return_token_ids": True, "temperature": 1}
    async with httpx.AsyncClient(base_url=engine.client.url + "/v1", timeout=120) as http:
        answer = await http.post("/chat/completions", json=body | forced | wanted)
    if answer.is_error:
        return "refused"
    choice = answer.json()["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return await _sampled(engine, answer.json()["prompt_token_ids"], choice["token_ids"], logprobs)


async def _sampled(engine: FamilyEngine, prompt: list[int], ids: list[int], logprobs: list[float]) -> Sampled:
    """Compare log-probabilities with those of the same ids in a prompt."""
    free = (await engine.score([*prompt, *ids]))[-len(ids) :]
    alike = all(math.isclose(one, two, abs_tol=_TOLERANCE) for one, two in zip(logprobs, free, strict=True))
    return "free" if alike else "grammar"


def grammar_page(results: Sequence[GrammarResult]) -> str:
    """Return the text of benchmarks/results/grammars.md."""
    head = ["family", "parsed by", *REQUESTS]
    rows = [head, ["---"] * len(head)]
    for result in results:
        cells = [_cell(row) for row in result.rows] or [str(result.problem)] + [""] * (len(REQUESTS) - 1)
        rows.append([result.family, result.found, *cells])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"""\
# Grammars

Generated by `python benchmarks/families.py --grammars --write`, on a real vLLM 0.32 on a CPU.

vLLM samples some answers under a grammar that the request did not ask for. Their log-probabilities are not the
policy's, so they must be recorded as constrained, and they are not trained. Each cell has three parts: what vLLM's chat
route does with the request when it is sent there directly; what Polar's first call does, which that route renders; and
what its second call does, which is sampled from exact ids (unless `rendered` is added).

* free, grammar: found by comparing the log-probabilities with those of the same ids in a prompt;
* refused: the grammar forbids the form in which the template writes a call;
* **WRONG**: an answer that was recorded otherwise than it was sampled.

All requests have tools. "one call": `parallel_tool_calls: false`, which Polar does not send: it bounds the calls
itself, so that answers stay free. "strict": tools with `strict: true`. "required" and "named": values of
`tool_choice`, which some of vLLM's parsers do not enforce. "strict level": vLLM with `--tool-strict-level function`.

{table}
"""


def _cell(row: GrammarRow) -> str:
    first, *later = row.calls
    parts = [
        row.chat_route,
        first[1],
        *(sampled + (", rendered" if mode == "render" else "") for mode, sampled, _ in later),
    ]
    return " / ".join(parts) + ("" if row.right else " **WRONG**")
