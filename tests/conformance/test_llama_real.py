"""Real agents on a real llama-server that samples prescribed answers (`make test-llama`).

Its answers have tokens that end within a character, and calls whose arguments the agents write differently.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness_adapters.base import get_adapter
from polar_proxy.conformance.fidelity import FidelityJob, play_job
from polar_proxy.conformance.forced_vllm import make_model
from polar_proxy.conformance.runner import ScenarioRunner
from polar_proxy.engines.local import LocalEngine
from polar_proxy.store import Store
from polar_proxy.traces.audit import AuditReference, audit
from polar_proxy.traces.builders import build
from polar_proxy.traces.scoring import Scorer
from polar_proxy.types import PromptMode
from sandboxes.choice import choose
from tests.conformance.forced_llama import ForcedLlamaEngine
from tests.engines.llama_environment import serve_llama

pytestmark = [pytest.mark.by_command, pytest.mark.timeout(1200)]

HARNESSES = ("codex", "claude-code", "qwen-code", "mini-swe-agent")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama") / "polar-tiny")


@pytest.fixture(scope="module")
def url(model_dir: Path) -> Iterator[str]:
    yield from serve_llama(model_dir, "-c", "262144", "-np", "2", "-t", "1")


@pytest.fixture
async def local(model_dir: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(model_dir, name="polar-tiny") as engine:
        yield engine


@pytest.mark.parametrize("mode", ["continue", "render"])
@pytest.mark.parametrize("harness", HARNESSES)
async def test_continued_sessions_have_no_splits_and_pass_an_audit(
    url: str, local: LocalEngine, store: Store, harness: str, mode: PromptMode
) -> None:
    """The audit is a pass of the same weights in PyTorch."""
    cache = Path(os.environ.get("POLAR_CACHE_DIR") or Path("~/.polar/harnesses").expanduser())
    adapter = get_adapter(harness)
    if not adapter.is_installed(cache):
        pytest.skip(f"no {harness}: run `polar harness install {harness}`")
    job = FidelityJob(adapter, adapter.install(cache), "keeps", mode)
    async with ScenarioRunner(
        ForcedLlamaEngine(url), store, choose("auto").kind, patience=4, prompt_mode=mode
    ) as runner:
        row, run = await play_job(runner, job, score=False)
    assert (row.fault, row.adds_up) == (None, True)
    assert all(np.isfinite(choice.logprobs).all() for call in run.calls for choice in call.choices)
    traces = build(run.calls).traces
    audits = await audit(Scorer(local), AuditReference(local.info, None, same_model=True), traces, run.calls)
    largest = max(float(values.max()) for one in audits for values in one.differences.values())
    print(
        f"{harness} {mode}: {row.calls} calls, {row.continued} continued, {row.drifted} splits by drift, "
        f"{len(traces)} traces, {sum(one.tokens for one in audits)} tokens, largest difference "
        f"{largest:.1e}, {row.reasons}"
    )
    assert largest < 1e-3
    if mode == "continue":
        assert (row.drifted, row.continued >= 5) == (0, True), row.reasons
    else:
        assert row.drifted >= 3
