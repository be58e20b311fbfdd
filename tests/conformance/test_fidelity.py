"""Fidelity of a small agent with scripted answers; on a real vLLM and with real agents in `make test-full`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters.base import get_adapter
from polar_proxy.conformance.fidelity import FidelityJob, FidelityRow, count_tokens, play, play_job
from polar_proxy.conformance.forced_vllm import LOGITS_PROCESSOR, PLUGIN, TEMPLATES, ForcedVllmEngine
from polar_proxy.conformance.report import FIDELITY
from polar_proxy.conformance.runner import ScenarioRunner
from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import INFO, ScriptedEngine, ScriptedReply
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, Message, PromptMode, Sampling
from tests.conformance.small_agent import ReserialisingAgent, SmallAgent
from tests.engines import test_vllm_real as real

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


async def measured(store: Store, agent: SmallAgent, mode: PromptMode, engine: Engine | None = None) -> FidelityRow:
    async with ScenarioRunner(engine or ScriptedEngine(), store, "process", prompt_mode=mode) as runner:
        row, _ = await play_job(runner, FidelityJob(agent, agent.install(Path("/")), "keeps", mode))
        return row


async def test_reserialised_arguments_split_traces_in_render_mode_only(store: Store) -> None:
    rendered = await measured(store, ReserialisingAgent(), "render")
    continued = await measured(store, ReserialisingAgent(), "continue")
    assert rendered.outcomes == continued.outcomes == ("ok", "ok")
    assert (rendered.calls, rendered.bases) == (continued.calls, continued.bases) == (9, 8)
    assert rendered.drifted >= 4
    assert {"arguments_reserialised"} == set(rendered.causes)
    assert rendered.reasons == {"off": 8, "no_base": 1}
    assert rendered.traces == 1 + rendered.drifted
    assert (continued.drifted, continued.continued, continued.traces) == (0, 8, 1)
    for row in (rendered, continued):
        assert row.adds_up
        assert row.trained == row.recorded > 2000
        assert row.largest == pytest.approx(0, abs=1e-6)  # the scripted engine's own numbers
        assert row.scored > 0


async def test_an_agent_that_sends_answers_back_unchanged_does_not_drift(store: Store) -> None:
    row = await measured(store, SmallAgent(), "render")
    assert (row.drifted, row.traces, row.bases, row.continued) == (0, 1, 8, 0)


async def test_row_detects_counts_that_do_not_add_up() -> None:
    row = FidelityRow("a", "1", "render", "keeps", recorded=10, trained=7, excluded={"side_call": 3})
    assert row.adds_up
    assert not replace(row, trained=8).adds_up


async def test_side_calls_are_counted_as_excluded(store: Store) -> None:
    async with ScenarioRunner(ScriptedEngine(), store, "process") as runner:
        agent = SmallAgent()
        _, run = await play_job(runner, FidelityJob(agent, agent.install(Path("/")), "keeps", "continue"))
        calls = [replace(run.calls[0], edge="side_call"), *run.calls[1:]]
        row = FidelityRow("a", "1", "continue", "keeps")
        await count_tokens(row, calls, runner.engine, score=False)
    assert row.excluded == {"side_call": len(run.calls[0].choices[0].token_ids)}
    assert row.adds_up
    assert row.trained < row.recorded


async def test_page_is_made_from_the_document(store: Store) -> None:
    rows = [(await measured(store, ReserialisingAgent(), mode)).to_json() for mode in ("render", "continue")]
    first = FIDELITY.document(rows, engine=INFO, sandbox="process", cut_every=0)
    page = FIDELITY.markdown(first)
    drifted = rows[0]["drifted"]
    assert f"| small-agent | 1 | openai_chat | 9 | 8 | {drifted} | 0 | {drifted + 1} | 1 |" in page
    assert f"| small-agent | keeps | render | {drifted} | {drifted} x arguments_reserialised |" in page
    again = FIDELITY.document(rows[:1], engine=replace(INFO, engine="other"), sandbox="process", cut_every=0)
    both = FIDELITY.merged(first, again)
    assert [(row["mode"], row["engine"]) for row in both["rows"]] == [
        ("continue", "scripted"),
        ("render", "other 1, scripted-model"),
    ]


async def test_concurrent_runs_do_not_mix() -> None:
    agents = [SmallAgent(), ReserialisingAgent()]
    jobs = [
        FidelityJob(agent, agent.install(Path("/")), "keeps", mode)
        for agent in agents
        for mode in ("continue", "render")
    ]
    rows = [
        row async for row, _ in play(jobs, lambda template: ScriptedEngine(), "process", concurrency=4, score=False)
    ]
    assert sorted((row.calls, row.drifted > 0, row.mode) for row in rows) == [
        (9, False, "continue"),
        (9, False, "continue"),
        (9, False, "render"),
        (9, True, "render"),
    ]


# On a real vLLM


@pytest.fixture(scope="module")
def forced_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from polar_proxy.conformance.forced_vllm import make_model

    model = make_model(tmp_path_factory.mktemp("fidelity-model"))
    flags = ("--reasoning-parser", "qwen3", "--logits-processors", LOGITS_PROCESSOR, "--trust-request-chat-template")
    yield from real.serve(model, *flags, env={"PYTHONPATH": str(PLUGIN), "POLAR_VLLM_LEN": "131072"})


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_vllm_samples_forced_tokens_with_the_models_own_logprobs(forced_url: str) -> None:
    reply = ScriptedReply('Well. {"a": "é"}  ', "Hm.\n")
    async with ForcedVllmEngine(forced_url, script=lambda request: reply, cut_every=4) as engine:
        request = ChatRequest(engine.info.model, (Message("user", "Hi"),), Sampling(max_tokens=200))
        events = [event async for event in engine.sample(request)]
        ids = [token for event in events for token in event.token_ids]
        wanted = await engine.tokens("<think>\nHm.\n\n</think>\n\n" + reply.text)
        assert tuple(ids) == wanted
        whole = await engine.client.encode("<think>\nHm.\n\n</think>\n\n" + reply.text)
        assert ids[:-1] != whole  # otherwise nothing awkward was sampled
        prompt = list(next(event.prompt_ids for event in events if event.prompt_ids is not None))
        fresh = (await engine.score([*prompt, *ids]))[len(prompt) - 1 :]
        reported = [value for event in events for value in event.logprobs]
        assert reported == pytest.approx(fresh, abs=1e-3)
        assert "".join(event.text for event in events).strip() == reply.text.strip()


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("template", TEMPLATES)
async def test_real_agents_drift_in_render_mode_and_never_in_continue_mode(forced_url: str, template: str) -> None:
    cache = Path(os.environ.get("POLAR_CACHE_DIR") or Path("~/.polar/harnesses").expanduser())
    adapters = [get_adapter(name) for name in ("codex", "claude-code", "pi", "qwen-code", "mini-swe-agent")]
    installed = [adapter for adapter in adapters if adapter.is_installed(cache)]
    if not installed:
        pytest.skip(
            "no harness is installed: `make test-full` installs them in its other tests, or `polar harness install`"
        )

    def engine(name: str) -> Engine:
        path = TEMPLATES[name]
        return ForcedVllmEngine(forced_url, template=None if path is None else path.read_text())

    async def rows_of(mode: PromptMode) -> list[FidelityRow]:
        jobs = [FidelityJob(adapter, adapter.install(cache), template, mode) for adapter in installed]
        played = play(jobs, engine, real_sandbox(), concurrency=4, patience=4, score=mode == "continue")
        return [row async for row, _ in played]

    continued = await rows_of("continue")
    # The runs in render mode show that there is drift to prevent. One template is enough for that.
    rendered = await rows_of("render") if template == "keeps" else []
    rows = [*continued, *rendered]
    assert {row.harness: row.fault for row in rows if row.fault} == {}
    assert {(row.harness, row.mode): row.excluded for row in rows if not row.adds_up} == {}
    assert {row.harness: row.causes for row in continued if row.drifted} == {}
    assert all(row.continued >= 5 for row in continued)
    assert all(row.drifted >= 3 for row in rendered)
    assert all(row.largest is not None and row.largest < 1e-3 for row in continued)


def real_sandbox():  # type: ignore[no-untyped-def]
    from sandboxes.choice import choose

    return choose("auto").kind
