"""vLLM's weight transfer between two programs on a CPU: vLLM's own code on both sides, with another transport.

NCCL needs two GPUs. Here vLLM's `StatelessProcessGroup` replaces it, which sends tensors through its TCP store.
`install` is a plugin of the server (entry point of `vllm.general_plugins`), and is called by the sending program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class StoreCommunicator:
    """The part of vLLM's `PyNcclCommunicator` that weight transfer uses."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if self._group.rank == src:
            self._group.broadcast_obj(tensor.clone(), src)
        else:
            tensor.copy_(self._group.broadcast_obj(None, src))

    def destroy(self) -> None:
        self._group = None


def _join(
    master_address: str, master_port: int, rank: int, world_size: int, device: object = None
) -> StoreCommunicator:
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(host=master_address, port=master_port, rank=rank, world_size=world_size)
    return StoreCommunicator(group)


def _produce(
    *,
    iterator: Iterable[Any],
    group: StoreCommunicator,
    src: int,
    post_iter_func: Callable[[Any], Tensor],
    **buffers: int,
) -> None:
    for item in iterator:
        group.broadcast(post_iter_func(item), src)


def _consume(
    *,
    iterator: Iterable[Any],
    group: StoreCommunicator,
    src: int,
    post_unpack_func: Callable[[Any], object],
    **buffers: object,
) -> None:
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])


def install() -> None:
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine

    nccl_common.stateless_init_process_group = _join
    nccl_engine.packed_nccl_broadcast_producer = _produce
    nccl_engine.packed_nccl_broadcast_consumer = _consume
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *device: None
