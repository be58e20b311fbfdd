"""Send new weights to the engine that samples, and check that it loaded them.

After each sync, the engine and the trainer both score a fixed prompt (the probe). Three things are checked:

* Their log-probabilities differ by at most a tolerance.
* The engine is not much nearer (by a factor of 4) to the trainer's old weights than to the current ones. Small updates
  hide within any tolerance, so an engine that silently kept the old weights would pass the first check.
* The mean difference of engine and trainer is small. One of two bounds must hold: 4 times the mean difference after
  the first sync, or a tenth of the mean change of the trainer's log-probabilities since the last sync. If neither
  holds, the engine loaded only a part of the weights.

Each kind of sync with vLLM (from disk, as a LoRA adapter, from GPU to GPU by NCCL) uses vLLM's development mode: the
server pauses, loads the weights, is told their version, and resumes. NCCL uses vLLM's own code on both sides. Source:
https://docs.vllm.ai/en/latest/training/weight_transfer/ (0.32: `WeightTransferTrainerFactory`, backend `nccl`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

import httpx
import numpy as np
import torch
from torch import Tensor

from polar_proxy.engines.base import Engine
from polar_proxy.engines.vllm import WEIGHT_VERSION_SECONDS, VllmEngine
from polar_proxy.errors import EngineError, TrainingError, UsageError
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.policy.lora import MergedWeights, save_adapter
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.engines.local import LocalEngine

PROBE_TOKENS = 48
REQUEST_SECONDS = 600.0
"""Time-out of each request of a sync, and of the probe."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
REMEDIES = {
    "lora": "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    "version": "This vLLM cannot report the policy version of a token: use vLLM 0.32",
    "transfer": 'Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\'',
}
"""A word in a request's route -> what to do if the server refuses the request."""
VLLM_MISSING = (
    "NCCL needs vLLM in the trainer's environment too, and vLLM is not installed there. Install the server's version "
    "of vLLM beside Polar (pip install 'polar-proxy[local]' vllm==VERSION), or leave weight_transfer at disk"
)


T = TypeVar("T")


class WeightSync(Protocol):
    """Sends weights to one kind of engine."""

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        """Send the weights, and return once all new tokens are sampled with them. Raise TrainingError if the engine
        does not load the weights."""
        ...


class LocalSync:
    """Copies the weights in memory between two of the engine's decoding steps.

    Answers in flight continue with the new weights; the version of each token is recorded.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        try:
            await self._engine.load_weights(weights, version)
        except EngineError as error:
            raise TrainingError(f"the engine did not load the weights of version {version}: {error}") from error


# The probe


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Differences of engine and trainer in nats over the tokens of the probe."""

    largest: float
    mean: float
    moved: float | None
    """Mean absolute change of the trainer's own log-probabilities since the last sync, nats; None at the first sync."""


def probe_ids(vocab_size: int, count: int = PROBE_TOKENS) -> list[int]:
    """Return the same random tokens in every run. Random text is unlikely, so its log-probabilities change much with
    the weights."""
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, count)]


async def probe(
    engine: Engine,
    ids: Sequence[int],
    logprobs: Sequence[float],
    last_logprobs: Sequence[float] | None,
    tolerance: float,
    noise: float | None = None,
) -> ProbeResult:
    """Compare the engine's log-probabilities of ids[1:] with the trainer's: `logprobs` (now) and `last_logprobs` (at
    the last sync).

    `noise` is the mean difference at the first sync, when engine and trainer have the same weights and only compute
    differently. Raises TrainingError if the engine does not have the trainer's weights.
    """
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            scored = np.array(await engine.score(ids))
    except TimeoutError:
        raise TrainingError(f"the engine did not score the probe within {REQUEST_SECONDS:g} s after the sync") from None
    except EngineError as error:
        raise TrainingError(f"the engine cannot score the probe after the sync: {error}") from error
    gaps = np.abs(scored - np.array(logprobs))
    largest, mean = float(gaps.max()), float(gaps.mean())
    if not largest <= tolerance:  # NaN fails too
        raise TrainingError(
            f"after the sync, engine and trainer differ by up to {largest:.3g} nats on the probe (allowed: "
            f"{tolerance:g}): the engine has other weights, or computes differently (dtype, quantisation). Training on "
            "its samples would be wrong; raise probe_tolerance only if you know why they differ"
        )
    if last_logprobs is None:
        return ProbeResult(largest, mean, None)
    last = np.array(last_logprobs)
    moved = float(np.abs(np.array(logprobs) - last).mean())
    # A wide margin: a move that is smaller than the noise between engine and trainer proves nothing either way.
    if float(np.abs(scored - last).mean()) < mean / 4:
        raise TrainingError(
            "the engine was sent new weights and did not load them: on the probe, its log-probabilities differ from "
            f"the trainer's by {mean:.3g} nats on average, and are much nearer to those of the old weights. The "
            f"trainer's old and new weights differ by {moved:.3g}"
        )
    # Wide margins again: the noise changes with the weights, and a part that was not loaded shows clearly.
    if noise is not None and mean > 4 * noise and mean > moved / 10:
        raise TrainingError(
            "the engine was sent new weights and loaded only a part of them: on the probe, engine and trainer differ "
            f"by {mean:.3g} nats on average. They differed by {noise:.3g} at the first sync, and the trainer's old and "
            f"new weights differ by {moved:.3g}. (vLLM on a CPU keeps the old head if head and embedding are tied: "
            "serve a copy of the model with a separate head, as scripts/vllm_cpu.sh does)"
        )
    return ProbeResult(largest, mean, moved)


# vLLM


def make_vllm_sync(config: GrpoConfig, control: VllmControl, folder: Path) -> WeightSync:
    """Return the sync that the configuration asks for. `folder` is where the weights are written for vLLM."""
    if config.lora is not None and config.lora.adapter_name is not None:
        return VllmAdapterSync(control, folder, config.lora.adapter_name)
    if config.weight_transfer == "nccl":
        return VllmNcclSync(control, host=config.weight_transfer_host, device=config.device)
    return VllmDiskSync(control, folder)


@dataclass(frozen=True, slots=True)
class VllmControl:
    """Control of one vLLM server in development mode (VLLM_SERVER_DEV_MODE=1)."""

    url: str
    mode: str = "keep"
    """Treatment of calls in flight: `keep` freezes them and continues with the new weights, `wait` lets them finish
    first, `abort` aborts them."""
    engine: VllmEngine | None = None
    """The client through which this process samples from the server; None if other processes may sample from the server
    as well. With None, a pause also waits until these processes have dropped their cached weight version
    (WEIGHT_VERSION_SECONDS)."""
    transport: httpx.AsyncBaseTransport | None = None

    @contextlib.asynccontextmanager
    async def paused(self, version: str) -> AsyncIterator[httpx.AsyncClient]:
        """Pause sampling while the block runs. Afterwards, all tokens are sampled with the weights of `version`.

        Pausing also empties the prefix cache, which the old weights filled.
        """
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_SECONDS, transport=self.transport) as http:
            await request(http, "POST", f"/pause?mode={self.mode}")
            try:
                yield http
                await request(http, "POST", "/update_weight_version", {"new_version": version})
                if self.engine is None:
                    await asyncio.sleep(WEIGHT_VERSION_SECONDS)
                else:
                    self.engine.weights_changed()
            except BaseException:
                with contextlib.suppress(TrainingError):  # report the error that stopped the sync, not its consequences
                    await request(http, "POST", "/resume", timeout=10.0)
                raise
            await request(http, "POST", "/resume")


class VllmDiskSync:
    """Writes the weights as safetensors into a folder that vLLM can read, and has vLLM reload them."""

    def __init__(self, control: VllmControl, folder: Path) -> None:
        self._control = control
        self._folder = folder

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        target = self._folder / f"version-{version}"
        await asyncio.to_thread(_write_safetensors, weights, target)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
        async with self._control.paused(version) as http:
            await request(http, "POST", "/collective_rpc", reload)
        await asyncio.to_thread(shutil.rmtree, target)


class VllmAdapterSync:
    """Has vLLM reload the adapter under the name that requests use; the base weights do not change.

    The server needs `--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and `--lora-modules NAME=FOLDER` with the
    adapter that `polar train adapter` writes. The files stay, because vLLM may read them again.
    """

    def __init__(self, control: VllmControl, folder: Path, name: str) -> None:
        self._control = control
        self._folder = folder
        self._name = name

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        if not isinstance(weights, MergedWeights):
            raise TrainingError("there is no adapter to reload: `lora` is not set")
        target = self._folder / self._name
        await asyncio.to_thread(save_adapter, weights.adapter, weights.settings, target)
        reload = {"lora_name": self._name, "lora_path": str(target), "load_inplace": True}
        async with self._control.paused(version) as http:
            await request(http, "POST", "/v1/load_lora_adapter", reload)


class VllmNcclSync:
    """Broadcasts all weights over an NCCL group of this process and vLLM's workers, formed at the first sync.

    The server needs development mode and `--weight-transfer-config '{"backend": "nccl"}'`. The same vLLM must be
    importable here, and the trainer needs a GPU that no worker uses: NCCL refuses two ranks on one GPU.
    """

    def __init__(self, control: VllmControl, *, host: str = "127.0.0.1", device: str = "cuda") -> None:
        """`host`: the address at which vLLM's workers reach this process. Raises UsageError without vLLM."""
        if importlib.util.find_spec("vllm") is None:
            raise UsageError(VLLM_MISSING)
        self._control = control
        self._host = host
        self._device = torch.device(device)
        self._source = NcclWeightSource(self._device)
        self._sender: Any = None
        """vLLM's `TrainerWeightTransferEngine`, after the first sync."""

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        self._source.weights = with_head(weights)
        async with self._control.paused(version) as http:
            if self._sender is None:
                response = await request(http, "GET", "/get_world_size")
                workers = int(response.json()["world_size"])  # over tensor, pipeline and data parallelism
                self._sender = await self._run_in_thread(lambda client: self._join_group(client, workers))
            await self._run_in_thread(self._send)

    def _join_group(self, client: NcclControlClient, workers: int) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(
            master_address=self._host, master_port=_free_port(), world_size=1 + workers, packed=True, rank=0
        )
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=cast(Any, self._source))

    def _send(self, client: NcclControlClient) -> None:
        self._sender.client = client
        self._sender.send_weights()

    async def _run_in_thread(self, work: Callable[[NcclControlClient], T]) -> T:
        """Run `work` in a new thread and return its result.

        NCCL waits forever for the other side. So if vLLM refuses a request, raise an error at once and abandon the
        thread, which does not keep the process alive.
        """
        result: Future[T] = Future()

        def fail(error: TrainingError) -> None:
            with contextlib.suppress(InvalidStateError):  # vLLM refused a request, which made the work fail
                result.set_exception(error)

        def run() -> None:
            try:
                if self._device.type != "cpu":
                    torch.accelerator.set_device_index(self._device.index or 0)  # the device is a property of a thread
                value = work(NcclControlClient(self._control.url, fail))
            except TrainingError as error:
                fail(error)
            except Exception as error:  # noqa: BLE001 - raised again in the caller's task
                wrapped = TrainingError(f"the weights could not be sent by NCCL: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                fail(wrapped)
            else:
                with contextlib.suppress(InvalidStateError):  # it failed before, and the caller no longer waits
                    result.set_result(value)

        threading.Thread(target=run, name="nccl", daemon=True).start()
        return await asyncio.wrap_future(result)


class NcclWeightSource:
    """vLLM's `WeightSource`: the tensors that this process sends, in a fixed order, by their names in a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.weights: Mapping[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            yield name, tensor.detach().to(self._device)


class NcclControlClient:
    """vLLM's `VLLMWeightSyncClient` over HTTP. vLLM's weight sender calls it from its own threads.

    `on_error` is called with every error before the error is raised in the sender's thread.
    """

    def __init__(self, url: str, on_error: Callable[[TrainingError], object]) -> None:
        self._url, self._on_error = url, on_error

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", None)

    def update_weights(self, update_info: Json) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: Json | None) -> None:
        try:
            response = httpx.post(f"{self._url.rstrip('/')}{path}", json=body, timeout=REQUEST_SECONDS)
            _check(response, f"POST {path}")
        except httpx.HTTPError as error:
            self._fail(_no_answer(f"POST {path}", error))
        except TrainingError as error:
            self._fail(error)

    def _fail(self, error: TrainingError) -> NoReturn:
        self._on_error(error)
        raise error


async def request(
    http: httpx.AsyncClient, method: str, path: str, body: Json | None = None, timeout: float = REQUEST_SECONDS
) -> httpx.Response:
    """Send a request. Raises TrainingError unless the answer is 200."""
    try:
        response = await http.request(method, path, json=body, timeout=timeout)
    except httpx.HTTPError as error:
        raise _no_answer(f"{method} {path}", error) from error
    _check(response, f"{method} {path}")
    return response


def with_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with an entry for the output head, even if the head is tied to the embedding.

    Servers with a separate head need this entry; other servers skip it.
    """
    if HEAD in weights or EMBEDDING not in weights:
        return dict(weights)
    return {**weights, HEAD: weights[EMBEDDING]}


def _no_answer(call: str, error: httpx.HTTPError) -> TrainingError:
    return TrainingError(f"vLLM did not answer {call}: {error or type(error).__name__}")


def _check(response: httpx.Response, call: str) -> None:
    if response.status_code == 200:
        return
    remedy = next((text for word, text in REMEDIES.items() if word in call), "Start it with VLLM_SERVER_DEV_MODE=1")
    hint = f" {remedy}." if response.status_code == 404 or "init_weight_transfer" in call else ""
    raise TrainingError(f"vLLM answers {response.status_code} to {call}: {response.text[:300]}{hint}")


def _write_safetensors(weights: Mapping[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in with_head(weights).items()}
    if HEAD in tensors and HEAD not in weights:
        tensors[HEAD] = tensors[HEAD].clone()  # safetensors refuses one tensor under two names
    save_file(tensors, folder / "model.safetensors")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])
