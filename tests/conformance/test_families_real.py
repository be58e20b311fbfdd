"""Model families on a real vLLM, with their own templates and parsers (`benchmarks/families.py` runs all of them)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks._families.agents import run_agents
from benchmarks._families.families import load_families
from benchmarks._families.grammars import REQUESTS, run_grammars
from benchmarks._families.real import run_families
from benchmarks._families.served_families import SERVED, STRICT_LEVEL
from harness_adapters.base import get_adapter
from tests.engines.vllm_environment import vllm_python

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

FAMILIES = (
    *("Qwen3", "Qwen3.5", "Kimi-K2", "MiniMax-M2", "Nemotron-3", "Ministral-3", "Granite-4"),
    *("DeepSeek-V3.1", "Gemma-4", "Llama-3.1", "gpt-oss"),
)
MISREAD = ("DeepSeek-V3.1", "Gemma-4", "Llama-3.1")
"""vLLM's own chat route gives some of their answers otherwise than the model wrote them. How many depends on how vLLM
batches tokens: its parser for DeepSeek loses a call that comes in one piece, and the one for Llama gives empty
arguments as `{}` only if they come in one piece. So Polar may read one answer otherwise, too."""


async def test_every_call_is_continued_and_read_as_the_chat_route_reads_it() -> None:
    vllm_python()
    wanted = [family for family in SERVED if family.name in FAMILIES]
    results = [result async for result in run_families(wanted, servers=2)]
    assert [result.name for result in results] == list(FAMILIES)
    for result in results:
        assert result.problem is None, result
        for session in result.sessions:
            assert (session.continued, session.splits) == (10, 0), result
            assert session.misread == 0 or result.name in MISREAD, result
            assert session.read >= 11 - max(session.misread, result.name in MISREAD), result
            assert session.largest is not None
            assert session.largest < 1e-3, result


async def test_answers_are_recorded_as_constrained_exactly_if_they_were_sampled_under_a_grammar() -> None:
    """One family of Polar's own parser, one of vLLM's parsers."""
    vllm_python()
    wanted = [family for family in SERVED if family.name in ("Qwen3", "Llama-3.1")]
    results = [result async for result in run_grammars(wanted)]
    assert {result.family: result.problem for result in results} == {"Qwen3": None, "Llama-3.1": None}
    for result in results:
        assert [row.request for row in result.rows if not row.right] == []
        found = {row.request: (row.chat_route, *(sampled for _, sampled, _ in row.calls)) for row in result.rows}
        assert list(found) == list(REQUESTS)
        assert found["tools"] == ("free", "free", "free")
        assert found["one call"] == ("grammar", "free", "free"), "Polar bounds the calls itself"
        assert found["strict"] == ("grammar", "grammar", "grammar")


async def test_a_server_that_adds_its_own_grammar_is_recorded_as_constrained() -> None:
    vllm_python()
    (result,) = [result async for result in run_grammars([one for one in STRICT_LEVEL if "Qwen3.5" in one.name])]
    assert (result.problem, result.found) == (None, "not continued")
    assert [row.request for row in result.rows if not row.right] == []
    assert {row.chat_route for row in result.rows} == {"grammar", "refused"}


async def test_real_agents_on_qwen35_never_drift_in_continue_mode() -> None:
    vllm_python()
    (served,) = [family for family in SERVED if family.name == "Qwen3.5"]
    (family,) = [family for family in load_families() if family.name == served.template]
    cache = Path(os.environ.get("POLAR_CACHE_DIR") or Path("~/.polar/harnesses").expanduser())
    adapters = [get_adapter(name) for name in ("codex", "pi", "mini-swe-agent")]
    if not all(adapter.is_installed(cache) for adapter in adapters):
        pytest.skip("codex, pi and mini-swe-agent are not installed: `polar harness install`")
    rows = [row async for row, _ in run_agents(served, family, adapters, cache, ["continue"])]
    assert {row.harness: row.fault for row in rows if row.fault} == {}
    assert all(row.adds_up for row in rows)
    assert [row.mode for row in rows] == ["continue"] * len(adapters)
    assert {row.harness: row.causes for row in rows if row.drifted} == {}
    assert all(row.continued >= 5 for row in rows)
    assert all(row.largest is not None and row.largest < 1e-3 for row in rows)
