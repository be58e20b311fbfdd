"""`vllm`: a vLLM server as an engine.

A probe of the server, and not its version number, decides what works:

* Recording needs `return_token_ids`: vLLM 0.10.2 or newer.
* Continuing from exact tokens also needs `structured_outputs` for its verification: vLLM 0.11 or newer.
* Publishing new weights with their policy version needs `/update_weight_version`: vLLM 0.32 or newer.
* Policy versions per token (`return_weight_versions`) need vLLM 0.33; older servers report one version per call.

Polar's tests run against vLLM 0.32.0 on CPU (`scripts/vllm_cpu.sh`).
"""

from polar_proxy.engines.vllm.engine import WEIGHT_VERSION_SECONDS, VllmEngine

__all__ = ["WEIGHT_VERSION_SECONDS", "VllmEngine"]
