"""Sessions of ten model families on a real vLLM with the family's own template and parsers (about five minutes).

`benchmarks/families.py --vllm` runs all families, and writes docs/families.md.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks._families.planned_session import PLAN
from benchmarks._families.real import ENVIRONMENT, ServedResult, run_families
from benchmarks._families.served_families import SERVED

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NAMES = (
    "Qwen3",
    "Qwen3.5",
    "Qwen3-Coder",
    "Kimi-K2",
    "MiniMax-M2",
    "Nemotron-3",
    "Ministral-3",
    "Seed-OSS",
    "Granite-4",
    "DeepSeek-V3.1",
)


@pytest.fixture(scope="module")
def results() -> dict[str, ServedResult]:
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"no vLLM: run `scripts/vllm_cpu.sh install {ENVIRONMENT}`, or set POLAR_VLLM_CPU")

    async def run() -> dict[str, ServedResult]:
        families = [family for family in SERVED if family.name in NAMES]
        return {result.name: result async for result in run_families(families, servers=2)}

    return asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_family_continues_and_is_read_right(results: dict[str, ServedResult], name: str) -> None:
    result = results[name]
    assert result.problem is None
    assert [session.stream for session in result.sessions] == [True, False]
    for session in result.sessions:
        assert session.differences == []
        assert (session.continued, session.read, session.splits) == (len(PLAN) - 1, len(PLAN), 0), session.reasons
        assert session.largest is not None
        assert session.largest < 1e-3
