"""Fidelity: measure with real agents and a real vLLM with forced answers whether the trained tokens are the sampled
ones.

`answers` writes awkward answers, `forced_vllm` makes vLLM sample them, `measure` counts every sampled token as trained
or excluded and explains where a prompt differs from them, `play` runs the jobs, `report` makes the file and the page.
"""

from polar_proxy.conformance.fidelity.forced_vllm import CUT_EVERY, LOGITS_PROCESSOR, PLUGIN, ForcedVllmEngine
from polar_proxy.conformance.fidelity.measure import ExplainedDrift, FidelityRow, measure_harness
from polar_proxy.conformance.fidelity.play import MODES, TASK, TEMPLATES, FidelityJob, measure_drift, play
from polar_proxy.conformance.fidelity.report import document, is_good, markdown, merged, save

__all__ = [
    "CUT_EVERY",
    "LOGITS_PROCESSOR",
    "MODES",
    "PLUGIN",
    "TASK",
    "TEMPLATES",
    "ExplainedDrift",
    "FidelityJob",
    "FidelityRow",
    "ForcedVllmEngine",
    "document",
    "is_good",
    "markdown",
    "measure_drift",
    "measure_harness",
    "merged",
    "play",
    "save",
]
