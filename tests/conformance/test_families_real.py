"""Model families on a real vLLM, with their own templates and parsers (`benchmarks/families.py` runs all of them)."""

from __future__ import annotations

import pytest

from benchmarks._families.real import run_families
from benchmarks._families.served_families import SERVED
from tests.engines.vllm_environment import vllm_python

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

FAMILIES = ("Qwen3.5", "Granite-4")
"""Several of vLLM's parsers fit each of them. The first reasons and writes calls as XML, the other writes JSON."""


async def test_every_call_is_continued_and_read_as_the_chat_route_reads_it() -> None:
    vllm_python()
    wanted = [family for family in SERVED if family.name in FAMILIES]
    results = [result async for result in run_families(wanted, servers=2)]
    assert [result.name for result in results] == list(FAMILIES)
    for result in results:
        assert result.problem is None, result
        for session in result.sessions:
            assert (session.continued, session.read, session.misread, session.splits) == (10, 11, 0, 0), result
            assert session.largest is not None
            assert session.largest < 1e-3, result
