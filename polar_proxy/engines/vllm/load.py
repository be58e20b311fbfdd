"""What vLLM's `/metrics` says of its load (https://docs.vllm.ai/en/latest/usage/metrics/)."""

from __future__ import annotations

import re
from statistics import fmean

from polar_proxy.engines.base import EngineLoad

_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""A share from 0 to 1, whatever its name says; before 0.10 it had the second name."""
_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
# One sample of the text exposition: a name, labels or none, a value.
_SAMPLE = re.compile(rf"^({'|'.join((*_KV, _WAITING, _RUNNING))})(?:\{{[^\n]*\}})? +([^ \n]+)", re.MULTILINE)


def read_load(text: str) -> EngineLoad | None:
    """The load of all replicas behind one server. None where none of it is said. Values that are no finite number are
    left out."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if 0 <= number < float("inf"):
            found.setdefault(name, []).append(number)
    if not found:
        return None
    usage = next((fmean(found[name]) for name in _KV if name in found), None)
    replicas = max(map(len, found.values()))
    return EngineLoad(usage, _total(found.get(_WAITING)), _total(found.get(_RUNNING)), replicas)


def _total(values: list[float] | None) -> int | None:
    return None if values is None else round(sum(values))
