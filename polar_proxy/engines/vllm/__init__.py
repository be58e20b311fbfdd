"""`vllm`: a vLLM server as an engine.

Polar finds out what a server can do by sending it requests, and does not rely on its version number. The features below
are in vLLM since these versions:

* 0.10.2: `return_token_ids`, needed to record calls.
* 0.11: `structured_outputs`, needed to verify Polar's answer parser (`parser_proof.py`). Prompts are continued from
  exact tokens only with a verified parser.
* 0.32: `/update_weight_version`, needed to publish new weights with their policy version.
* 0.33: `return_weight_versions`, the policy version of each token. Older servers report one version per call.

Polar's tests run against vLLM 0.32.0 on CPU (`scripts/vllm_cpu.sh`).
"""

from polar_proxy.engines.vllm.engine import WEIGHT_VERSION_SECONDS, VllmEngine

__all__ = ["WEIGHT_VERSION_SECONDS", "VllmEngine"]
