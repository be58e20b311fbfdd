"""Run real agents on a model family on a real vLLM, with the awkward answers of `polar conformance --fidelity`.

The answers are written in the form of the family's template (`own_answers.py`), and cut into other tokens than the
tokenizer's.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

from benchmarks._families.families import Family
from benchmarks._families.own_answers import CUT_EVERY
from benchmarks._families.random_models import save_model
from benchmarks._families.real import FamilyEngine, planned, serve_vllm
from benchmarks._families.served_families import ServedFamily
from benchmarks._families.template_engine import TemplateEngine
from harness_adapters.base import HarnessAdapter
from polar_proxy.conformance.fidelity import MODES, FidelityJob, FidelityRow, play
from polar_proxy.conformance.report import FIDELITY
from polar_proxy.conformance.runner import choose_kind
from polar_proxy.types import Json, PromptMode

CONTEXT = 131_072
"""Context length in tokens. For an agent's prompt, the small model's tokenizer needs twice the tokens of a real one."""
_AT_ONCE = 2
_PATIENCE = 4.0


async def run_agents(
    served: ServedFamily,
    family: Family,
    adapters: Sequence[HarnessAdapter],
    cache: Path,
    modes: Sequence[PromptMode] = MODES,
) -> AsyncGenerator[tuple[FidelityRow, Json], None]:
    """Run installed agents on a family in these prompt modes. Yield the row and the report's document of each run.

    Raises ServerError if vLLM does not serve the family.
    """
    sandbox = await choose_kind("auto")
    renderer = TemplateEngine(family)
    jobs = [FidelityJob(adapter, adapter.install(cache), served.name, mode) for adapter in adapters for mode in modes]
    with tempfile.TemporaryDirectory(prefix="polar-family-") as folder:
        await asyncio.to_thread(save_model, Path(folder), renderer, served.architecture, CONTEXT)
        async with serve_vllm(Path(folder), served.name, *served.flags, context=CONTEXT) as url:
            played = play(
                jobs,
                lambda name: FamilyEngine(url, served, renderer, planned),
                sandbox,
                concurrency=_AT_ONCE,
                patience=_PATIENCE,
            )
            async with aclosing(played):
                async for row, info in played:
                    yield row, FIDELITY.document([row.to_json()], engine=info, sandbox=sandbox, cut_every=CUT_EVERY)
