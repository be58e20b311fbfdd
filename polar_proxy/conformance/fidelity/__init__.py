"""Fidelity: real agents and a real vLLM with given answers; are the tokens that are trained those that were sampled?

`awkward` writes answers as no serialiser would, `forced` makes vLLM sample them, `script` says what is done, `measure`
counts what became of every sampled token, `explain` shows where a prompt left them, `report` makes file and page.
"""

from polar_proxy.conformance.fidelity.explain import ExplainedDrift, explain
from polar_proxy.conformance.fidelity.forced_vllm import CUT_EVERY, LOGITS_PROCESSOR, PLUGIN, ForcedVllmEngine
from polar_proxy.conformance.fidelity.measure import FidelityRow, measure_one
from polar_proxy.conformance.fidelity.play import MODES, TEMPLATES, FidelityJob, play
from polar_proxy.conformance.fidelity.report import document, markdown, merged

__all__ = [
    "CUT_EVERY",
    "LOGITS_PROCESSOR",
    "MODES",
    "PLUGIN",
    "TEMPLATES",
    "ExplainedDrift",
    "FidelityJob",
    "FidelityRow",
    "ForcedVllmEngine",
    "document",
    "explain",
    "markdown",
    "measure_one",
    "merged",
    "play",
]
