"""New weights into vLLM from GPU to GPU, by NCCL: vLLM's weight-transfer API, with vLLM's own code on both sides.

Source: https://docs.vllm.ai/en/latest/training/weight_transfer/ (0.32: `WeightTransferTrainerFactory`, backend `nccl`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, NoReturn, TypeVar, cast

import httpx
import torch
from torch import Tensor

from polar_proxy.errors import UsageError
from polar_proxy.training.failures import TrainingError
from polar_proxy.training.vllm_control import SECONDS, VllmControl, call, check, no_answer, with_head
from polar_proxy.types import Json

MISSING = (
    "NCCL needs vLLM in the trainer's environment, too, and there is none. Polar agrees with vLLM's pins: "
    "pip install 'polar-proxy[local]' vllm==VERSION, of the version that serves; or leave `transfer` at disk"
)

T = TypeVar("T")


class VllmNcclSync:
    """vLLM's workers and this process join one NCCL group at the first sync; each sync broadcasts all weights over it.

    Needs a server in development mode with `--weight-transfer-config '{"backend": "nccl"}'`, the same vLLM importable
    here, and a GPU for the trainer that no worker uses: NCCL refuses two of a group on one.
    """

    def __init__(self, control: VllmControl, *, host: str = "127.0.0.1", device: str = "cuda") -> None:
        """`host`: at which vLLM's workers reach this process. `device`: from which the weights are sent.

        Raises UsageError without vLLM.
        """
        if importlib.util.find_spec("vllm") is None:
            raise UsageError(MISSING)
        self._control = control
        self._host = host
        self._device = torch.device(device)
        self._weights = NcclWeightSource(self._device)
        self._sender: Any = None
        """vLLM's `TrainerWeightTransferEngine`, from the first sync on."""

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        self._weights.now = with_head(weights)
        async with self._control.paused(version) as http:
            if self._sender is None:
                told = await call(http, "GET", "/get_world_size")
                workers = int(told.json()["world_size"])  # tensor, pipeline and data parallel together
                self._sender = await self._together(lambda calls: self._join(calls, workers))
            await self._together(self._send)

    def _join(self, calls: NcclControlClient, workers: int) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        told = NCCLTrainerInitInfo(
            master_address=self._host, master_port=_free_port(), world_size=1 + workers, packed=True, rank=0
        )
        return WeightTransferTrainerFactory.trainer_init(told, client=calls, source=cast(Any, self._weights))

    def _send(self, calls: NcclControlClient) -> None:
        self._sender.client = calls
        self._sender.send_weights()

    async def _together(self, work: Callable[[NcclControlClient], T]) -> T:
        """What `work` returns, in a thread of its own. NCCL waits for the other side without end, so that a call that
        vLLM refuses must end this at once: the thread is then left behind, and the process may end without it."""
        ended: Future[T] = Future()

        def fail(error: TrainingError) -> None:
            with contextlib.suppress(InvalidStateError):  # vLLM refused a call, and then the work failed for it
                ended.set_exception(error)

        def run() -> None:
            try:
                if self._device.type != "cpu":
                    torch.accelerator.set_device_index(self._device.index or 0)  # each thread has its own
                result = work(NcclControlClient(self._control.url, fail))
            except TrainingError as error:
                fail(error)
            except Exception as error:  # noqa: BLE001 - told in the caller's task
                told = TrainingError(f"the weights could not be sent by NCCL: {type(error).__name__}: {error}")
                told.__cause__ = error
                fail(told)
            else:
                with contextlib.suppress(InvalidStateError):  # nobody waits any more
                    ended.set_result(result)

        threading.Thread(target=run, name="nccl", daemon=True).start()
        return await asyncio.wrap_future(ended)


class NcclWeightSource:
    """vLLM's `WeightSource`: what this process sends, in one order, by the names of the checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.now: Mapping[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.now.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.now.items():
            yield name, tensor.detach().to(self._device)


class NcclControlClient:
    """vLLM's `VLLMWeightSyncClient`, over HTTP: called by its sender, from its threads. `refused` hears of an error
    before they do."""

    def __init__(self, url: str, refused: Callable[[TrainingError], object]) -> None:
        self._url, self._refused = url, refused

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
            check(httpx.post(f"{self._url.rstrip('/')}{path}", json=body, timeout=SECONDS), f"POST {path}")
        except httpx.HTTPError as error:
            self._refuse(no_answer(f"POST {path}", error))
        except TrainingError as error:
            self._refuse(error)

    def _refuse(self, error: TrainingError) -> NoReturn:
        self._refused(error)
        raise error


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])
