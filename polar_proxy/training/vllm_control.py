"""What new weights ask of a vLLM server, however they travel: it pauses, takes them, learns their version, resumes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import httpx
from torch import Tensor

from polar_proxy.engines.vllm.engine import WEIGHT_VERSION_SECONDS, VllmEngine
from polar_proxy.training.failures import TrainingError
from polar_proxy.types import Json

SECONDS = 600.0
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NEEDED = {
    "lora": "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    "version": "This vLLM cannot be told the policy version that its tokens are stamped with: 0.32 can",
    "transfer": 'Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\'',
}
"""By a word of the route: what the server lacks that does not know it."""


@dataclass(frozen=True, slots=True)
class VllmControl:
    """One server, in development mode (VLLM_SERVER_DEV_MODE=1)."""

    url: str
    mode: str = "keep"
    """What becomes of calls in flight: `keep` freezes them and they go on with the new weights, `wait` lets them end
    first, `abort` ends them."""
    engine: VllmEngine | None = None
    """Through which this process, and nobody else, samples from the server. Without it the pause is held until whoever
    samples has forgotten the version of before (WEIGHT_VERSION_SECONDS)."""
    transport: httpx.AsyncBaseTransport | None = None

    @contextlib.asynccontextmanager
    async def paused(self, version: str) -> AsyncIterator[httpx.AsyncClient]:
        """While the body runs nothing is sampled; from its end on, everything with the weights of `version`. A pause
        also empties the prefix cache, which the weights of before have filled."""
        async with httpx.AsyncClient(base_url=self.url, timeout=SECONDS, transport=self.transport) as http:
            await call(http, "POST", f"/pause?mode={self.mode}")
            try:
                yield http
                await call(http, "POST", "/update_weight_version", {"new_version": version})
                if self.engine is None:
                    await asyncio.sleep(WEIGHT_VERSION_SECONDS)
                else:
                    self.engine.weights_changed()
            except BaseException:
                with contextlib.suppress(TrainingError):  # what stopped the sync is told, not what came of it
                    await call(http, "POST", "/resume", timeout=10.0)
                raise
            await call(http, "POST", "/resume")


async def call(
    http: httpx.AsyncClient, method: str, path: str, body: Json | None = None, timeout: float = SECONDS
) -> httpx.Response:
    """Raises TrainingError unless the server agrees."""
    try:
        response = await http.request(method, path, json=body, timeout=timeout)
    except httpx.HTTPError as error:
        raise no_answer(f"{method} {path}", error) from error
    check(response, f"{method} {path}")
    return response


def no_answer(what: str, error: httpx.HTTPError) -> TrainingError:
    return TrainingError(f"vLLM did not answer to {what}: {error or type(error).__name__}")


def check(response: httpx.Response, what: str) -> None:
    """Raises TrainingError with what the server says, and what it lacks where that is known."""
    if response.status_code == 200:
        return
    needed = next((need for word, need in NEEDED.items() if word in what), "Start it with VLLM_SERVER_DEV_MODE=1")
    hint = f" {needed}." if response.status_code == 404 or "init_weight_transfer" in what else ""
    raise TrainingError(f"vLLM answers {response.status_code} to {what}: {response.text[:300]}{hint}")


def with_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where the head is the embedding, too: under its own name as well. A server whose head is a copy takes it by that,
    others skip it."""
    if HEAD in weights or EMBEDDING not in weights:
        return dict(weights)
    return {**weights, HEAD: weights[EMBEDDING]}
