"""Train one policy with several processes, each of which has a shard of the weights (FSDP2): `processes = 2` in
`[grpo]`.

Promises (tests/training/test_fsdp.py):

* A step gives the same result as with one process, up to rounding. For this, the weight of each token in the loss is
  computed from the whole batch.
* All processes get the same batch, and each computes its own packs (microbatches, see `packing.py`). A process with
  fewer packs than another runs empty passes, because a sharded model computes only when all processes take part.
* Checkpoints and engines get whole weights under their usual names. A run may be resumed with another number of
  processes.
* No process outlives the main process. If one of the others ends, the run ends and reports the reason.

The main process has rank 0, and has the feed, the engine and the checkpoints. Before it runs a method of its learner,
it sends the method's name to the other processes through pipes. Between methods the others wait at their pipes. They
do not wait inside a collective operation, because it has a time limit and rollouts may take hours.

Source: `torch.distributed.fsdp.fully_shard`, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from polar_proxy.errors import TrainingError
from polar_proxy.training.batch import TrainingBatch, TrainingSequence
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.policy.model import Learner, WeightsAfterStep, blocks_of, load_model
from polar_proxy.training.policy.packing import Microbatch, Pack, assign_to_processes, pack_for_processes
from polar_proxy.training.policy.tree import Ids, build_tree
from polar_proxy.training.step_stats import StepAccumulator, StepStats

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""If a process does not join a collective operation within this time, the process counts as dead."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Configuration of one process."""

    rank: int
    config: GrpoConfig
    model: Path
    reference: Path | None
    rendezvous: Path
    """The file by which torch's processes find each other. It must not exist yet."""
    threads: int

    @property
    def device(self) -> str:
        return f"cuda:{self.rank}" if self.config.device == "cuda" else "cpu"


class ShardedLearner(Learner):
    """The learner of one process. Every method runs in all processes at once, with the same arguments."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._processes = spec.config.processes
        self._rank = spec.rank
        self._empty_passes = 0
        """Number of empty passes that this process must add to have as many passes as the busiest process."""
        config = spec.config.model_copy(update={"device": spec.device})
        # Loaded on the CPU, because the whole model may be larger than a GPU.
        policy = load_model(spec.model)
        reference = None if spec.reference is None or config.kl_coef == 0 else load_model(spec.reference)
        if spec.config.device == "cuda":
            torch.cuda.set_device(spec.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if spec.config.device == "cuda" else "gloo",
            init_method=f"file://{spec.rendezvous}",
            rank=spec.rank,
            world_size=self._processes,
            timeout=COLLECTIVE_TIMEOUT,
        )
        mesh = dist.init_device_mesh(spec.config.device, (self._processes,))
        super().__init__(_shard_model(policy, mesh), config, reference and _shard_model(reference, mesh))

    def weights(self) -> dict[str, Tensor]:
        """Return whole copies of the parameters on the CPU."""
        return {name: _gather_tensor(parameter.detach()) for name, parameter in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimiser.state_dict()
        whole = {
            index: {name: _gather_tensor(value) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": whole}

    def load_shards(self, weights: Mapping[str, Tensor] | None, optimiser: Mapping[str, Any]) -> None:
        """Distribute the tensors of rank 0 to all processes. The other processes give None for `weights`, and for each
        tensor of `optimiser` that is sharded."""
        with torch.no_grad():
            for name, own in dict(self.model.named_parameters()).items():
                own.copy_(self._shard(None if weights is None else weights[name], own))
        trained = self.optimiser.param_groups[0]["params"]
        state = {
            index: {
                name: self._shard(value, trained[index])
                if value is None or _is_sharded(value)
                else copy.deepcopy(value)
                for name, value in values.items()
            }
            for index, values in optimiser["state"].items()
        }
        self.optimiser.load_state_dict({**optimiser, "state": state})

    def _shard(self, whole: Tensor | None, like: Any) -> Any:
        """Return this process's shard of a tensor. `whole` is the tensor in rank 0, None in the others."""
        from torch.distributed.tensor import distribute_tensor

        source = torch.empty(like.shape) if whole is None else whole
        return distribute_tensor(source.to(self._device, like.dtype), like.device_mesh, like.placements)

    def _pack(self, sequences: Sequence[Ids]) -> list[Pack]:
        return pack_for_processes(sequences, self._config.max_tokens_per_microbatch, self._processes)

    def _make_microbatches(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        microbatches = super()._make_microbatches(sequences)
        assigned = assign_to_processes([len(microbatch.tree) for microbatch in microbatches], self._processes)
        own = assigned[self._rank]
        self._empty_passes = max(map(len, assigned)) - len(own)
        return [microbatches[index] for index in own]

    def _join_other_processes(self, model: Any) -> None:
        tree = build_tree([np.zeros(1, dtype=np.int64)])
        for _ in range(self._empty_passes):
            if model is self.model:
                (self._forward(model, tree).sum() * 0.0).backward()  # type: ignore[no-untyped-call, unused-ignore]
            else:
                with torch.no_grad():
                    self._forward(model, tree)

    def _gather(self, own: StepAccumulator) -> list[StepAccumulator]:
        accumulators: list[Any] = [None] * self._processes
        dist.all_gather_object(accumulators, own)
        return accumulators

    def _clip_gradient(self) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        return float(norm.full_tensor())


class ShardedCoordinator(ShardedLearner):
    """The learner of rank 0. It makes the other processes run each of its methods too."""

    def __init__(self, spec: ProcessSpec, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        super().__init__(spec)

    def update(self, batch: TrainingBatch, step: int, weights_after: WeightsAfterStep | None = None) -> StepStats:
        assert weights_after is None, "the configuration refuses it"
        return self._run_in_all(super().update, batch, step)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self._run_in_all(super().logprobs, list(token_ids))

    def weights(self) -> dict[str, Tensor]:
        return self._run_in_all(super().weights)

    def state(self) -> dict[str, Any]:
        return self._run_in_all(super().state)

    def restore(self, weights: Mapping[str, Tensor], optimiser: dict[str, Any]) -> None:
        own = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        if own != {name: tensor.shape for name, tensor in weights.items()}:
            raise TrainingError("the checkpoint holds the weights of another model")
        others = {
            index: {name: None if _is_sharded(value) else value for name, value in values.items()}
            for index, values in optimiser["state"].items()
        }
        remote_arguments = (None, {**optimiser, "state": others})
        self._run_in_all(self.load_shards, weights, optimiser, remote_arguments=remote_arguments)

    def _run_in_all(
        self, method: Callable[..., T], *arguments: Any, remote_arguments: tuple[Any, ...] | None = None
    ) -> T:
        """Run a method of `ShardedLearner` in all processes, by default with the same arguments.

        Raises TrainingError if the method fails in any process, or if another process is gone.
        """
        name = method.__name__
        try:
            for pipe in self._pipes:
                pipe.send((name, arguments if remote_arguments is None else remote_arguments))
            failure: TrainingError | None = None
            try:
                result = method(*arguments)
            except TrainingError as error:  # the others raise the same and are ready for the next method
                failure = error
            errors = self._receive_errors()
        except (RuntimeError, OSError, EOFError) as error:
            reasons: list[str] = []
            with contextlib.suppress(OSError, EOFError):
                reasons = self._receive_errors()  # the others' errors explain more than the broken connection
            reason = "; ".join(reasons) or str(error)
            raise TrainingError(f"a process of this training run failed or ended during {name!r}: {reason}") from error
        if failure is not None:
            raise failure
        if errors:
            raise TrainingError(f"not all processes could continue after {name!r}: {'; '.join(errors)}")
        return result

    def _receive_errors(self) -> list[str]:
        """Wait until the other processes have run the method that was sent to them, and return their errors."""
        answers = enumerate([pipe.recv() for pipe in self._pipes], start=1)
        return [f"process {rank} of {self._processes}: {error}" for rank, error in answers if error is not None]


@contextlib.contextmanager
def launch_sharded(model: Path, reference: Path | None, config: GrpoConfig) -> Iterator[ShardedCoordinator]:
    """Start the other processes and yield the learner of rank 0. The other processes stop when the block ends.

    `model`, `reference`: the folders from which each process loads the policy and the reference model. Raises
    TrainingError if there are fewer GPUs than processes, or one of the processes does not start.
    """
    if config.device == "cuda" and torch.cuda.device_count() < config.processes:
        gpus = torch.cuda.device_count()
        raise TrainingError(
            f"{config.processes} processes need one GPU each, and this machine has {gpus}: lower `processes`"
        )
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // config.processes)
    with tempfile.TemporaryDirectory(prefix="polar-train-") as folder, contextlib.ExitStack() as stack:
        pipes: list[Connection] = []
        rendezvous = Path(folder) / "rendezvous"
        for rank in range(1, config.processes):
            ours, theirs = context.Pipe()
            spec = ProcessSpec(rank, config, model, reference, rendezvous, threads)
            process = context.Process(
                target=_process_main, args=(spec, theirs), daemon=True, name=f"polar-train-{rank}"
            )
            process.start()
            theirs.close()
            stack.callback(_end_process, process)
            stack.callback(ours.close)
            pipes.append(ours)
        for rank, pipe in enumerate(pipes, start=1):
            try:
                pipe.recv()
            except EOFError:
                raise TrainingError(f"process {rank} of {config.processes} did not start") from None
        stack.callback(_destroy_process_group)
        yield ShardedCoordinator(ProcessSpec(0, config, model, reference, rendezvous, threads), pipes)


def _process_main(spec: ProcessSpec, pipe: Connection) -> None:
    """Run the methods that rank 0 names, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; rank 0 handles it
    torch.set_num_threads(spec.threads)
    try:
        pipe.send(None)  # started: later errors go through the pipe
        learner = ShardedLearner(spec)
        while True:
            name, arguments = pipe.recv()
            failure = None
            try:
                getattr(learner, name)(*arguments)
            except TrainingError as error:
                failure = str(error)
            pipe.send(failure)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is over
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
        raise


def _end_process(process: Any) -> None:
    """Wait for a process, which ends when its pipe is closed; kill it if it hangs in a collective operation."""
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _shard_model(model: Any, mesh: Any) -> Any:
    """Shard every block of the model by itself: then a block's parameters are gathered only while the block is in use.
    Embeddings, norm and head are sharded together, as the root module."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    # Reshard the root after every forward pass too: one without a backward pass would leave it gathered.
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _gather_tensor(value: Any) -> Any:
    """Return a whole copy of a tensor, which does not change when training changes the original."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor().cpu()
    return value.clone() if isinstance(value, Tensor) else value


def _is_sharded(value: Any) -> bool:
    """Return whether a value of an optimiser's state is sharded like its parameter. Only the step count is whole."""
    return isinstance(value, Tensor) and value.ndim > 0
