"""Several processes train one policy, each with a shard of its weights (FSDP2): `processes = 2` in `[grpo]`.

Promises (tests/training/test_fsdp.py):

* A step is that of one process, to rounding: what a token weighs is decided over all of them.
* All processes have the same batch; each puts its own packs through the model, and runs empty passes where it has
  fewer, as a sharded model computes only with all processes taking part.
* Checkpoints and engines get whole weights under their usual names. A run may go on with another number of processes.
* No process outlives the run's own. If one of the others ends, the run ends with the reason.

The run's own process is the first: feed, engine and checkpoints are there. Before each method of its learner it tells
the others by a pipe which one to run. So nobody waits within a collective operation, which has a time limit, while
rollouts take their hours.

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

from polar_proxy.training.batch import TrainingBatch, TrainingSequence
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.failures import TrainingError
from polar_proxy.training.microbatch import Microbatch
from polar_proxy.training.model import Learner, load_model
from polar_proxy.training.packing import Pack, assign_to_processes, pack_for_processes
from polar_proxy.training.tally import StepAccumulator, StepStats
from polar_proxy.training.tree import Ids, pack_sequences
from polar_proxy.types import Json

TIME_LIMIT = timedelta(minutes=10)
"""Of one collective operation: a process that is behind the others by more is taken for dead."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process must know to take part."""

    rank: int
    config: GrpoConfig
    model: Path
    reference: Path | None
    meeting: Path
    """A file that does not exist yet, by which the processes find each other."""
    threads: int

    @property
    def device(self) -> str:
        return f"cuda:{self.rank}" if self.config.device == "cuda" else "cpu"


class ShardedLearner(Learner):
    """The learner of one process. Every method runs in all processes at once, with the same arguments."""

    def __init__(self, place: ProcessSpec) -> None:
        self._processes = place.config.processes
        self._rank = place.rank
        self._empty = 0
        """Passes that others make beyond one's own."""
        config = place.config.model_copy(update={"device": place.device})
        # Loaded on the CPU: whole it may be larger than a GPU.
        paths = (place.model, place.reference if config.kl > 0 else None)
        models = [None if path is None else load_model(path) for path in paths]
        if place.config.device == "cuda":
            torch.cuda.set_device(place.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.config.device == "cuda" else "gloo",
            init_method=f"file://{place.meeting}",
            rank=place.rank,
            world_size=self._processes,
            timeout=TIME_LIMIT,
        )
        mesh = dist.init_device_mesh(place.config.device, (self._processes,))
        policy, reference = (None if model is None else _sharded(model, mesh) for model in models)
        super().__init__(policy, config, reference)

    def weights(self) -> dict[str, Tensor]:
        """As a learner's, but whole copies on the CPU."""
        return {name: _whole(parameter.detach()) for name, parameter in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimiser.state_dict()
        whole = {
            index: {name: _whole(value) for name, value in values.items()} for index, values in state["state"].items()
        }
        return {**state, "state": whole}

    def take(self, weights: Mapping[str, Tensor] | None, optimiser: Json) -> None:
        """Each its shards of what the first process was given; None in the others. `optimiser` as `_outline` says."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, own in parameters.items():
                own.copy_(self._shard(None if weights is None else weights[name], own))
        trained = self.optimiser.param_groups[0]["params"]
        state = {
            index: {
                name: value if name in told["as_it_is"] else self._shard(value, trained[index])
                for name, value in told["values"].items()
            }
            for index, told in optimiser["state"].items()
        }
        self.optimiser.load_state_dict({**optimiser, "state": state})

    def _shard(self, whole: Tensor | None, like: Any) -> Tensor:
        """One's shard of a tensor that the first process has."""
        from torch.distributed.tensor import distribute_tensor

        given = torch.empty(like.shape, dtype=like.dtype) if whole is None else whole
        made: Tensor = distribute_tensor(
            given.to(device=self._device, dtype=like.dtype), like.device_mesh, like.placements
        )
        return made

    def _packs(self, sequences: Sequence[Ids]) -> list[Pack]:
        return pack_for_processes(sequences, self._config.max_tokens_per_microbatch, self._processes)

    def _passes(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        passes = super()._passes(sequences)
        hands = assign_to_processes([len(one.pack.tree) for one in passes], self._processes)
        own = hands[self._rank]
        self._empty = max(map(len, hands)) - len(own)
        return [passes[index] for index in own]

    def _accompany(self, model: Any | None) -> None:
        if model is None:
            return
        tree = pack_sequences([np.zeros(1, dtype=np.int64)])
        for _ in range(self._empty):
            if model is self.model:
                (self._forward(model, tree, None).sum() * 0.0).backward()  # type: ignore[no-untyped-call, unused-ignore]
            else:
                with torch.no_grad():
                    self._forward(model, tree, None)

    def _tallies(self, own: StepAccumulator) -> list[StepAccumulator]:
        tallies: list[Any] = [None] * self._processes
        dist.all_gather_object(tallies, own)
        return tallies

    def _clip(self) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        return float(norm.full_tensor())


class ShardedCoordinator(ShardedLearner):
    """The learner of the first process: the others do what it does."""

    def __init__(self, place: ProcessSpec, others: Sequence[Connection]) -> None:
        self._others = others
        super().__init__(place)

    def update(self, batch: TrainingBatch, step: int) -> StepStats:
        return self._all(lambda: super(ShardedCoordinator, self).update(batch, step), "update", batch, step)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self._all(lambda: super(ShardedCoordinator, self).logprobs(token_ids), "logprobs", list(token_ids))

    def weights(self) -> dict[str, Tensor]:
        return self._all(super().weights, "weights")

    def state(self) -> dict[str, Any]:
        return self._all(super().state, "state")

    def restore(self, weights: Mapping[str, Tensor], optimiser: dict[str, Any]) -> None:
        own = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        if own != {name: tensor.shape for name, tensor in weights.items()}:
            raise TrainingError("the checkpoint holds the weights of another model")
        self._all(
            lambda: self.take(weights, copy.deepcopy(_outline(optimiser, with_tensors=True))),
            "take",
            None,
            _outline(optimiser, with_tensors=False),
        )

    def _all(self, run: Callable[[], T], name: str, *arguments: Any) -> T:
        """Run a method in all processes. Raises TrainingError where one of the others fails or is gone."""
        try:
            for pipe in self._others:
                pipe.send((name, arguments))
            failure: TrainingError | None = None
            try:
                result = run()
            except TrainingError as error:  # the others come to the same, and stand ready for what comes next
                failure = error
            told = self._heard()
        except (RuntimeError, OSError, EOFError) as error:
            said: list[str] = []
            with contextlib.suppress(OSError, EOFError):
                said = self._heard()  # tells more than the connection that broke
            why = "; ".join(said) or str(error)
            raise TrainingError(f"a process that trains with this one ended during {name!r}: {why}") from error
        if failure is not None:
            raise failure
        if told:
            raise TrainingError(f"not all processes could go on after {name!r}: {'; '.join(told)}")
        return result

    def _heard(self) -> list[str]:
        """What the others say of the method: nothing where it went well."""
        answers = enumerate([pipe.recv() for pipe in self._others], start=1)
        return [f"process {rank} of {self._processes}: {told}" for rank, told in answers if told is not None]


@contextlib.contextmanager
def launch_sharded(model: Path, reference: Path | None, config: GrpoConfig) -> Iterator[ShardedCoordinator]:
    """Start the other processes, and end them. They load `model` (and `reference`) from the same folders.

    Raises TrainingError where there are fewer GPUs than processes, or one of the processes does not come up.
    """
    if config.device == "cuda" and torch.cuda.device_count() < config.processes:
        here_are = torch.cuda.device_count()
        raise TrainingError(f"{config.processes} processes need a GPU each, and this machine has {here_are}")
    spawning = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // config.processes)
    with tempfile.TemporaryDirectory(prefix="polar-train-") as folder, contextlib.ExitStack() as stack:
        pipes: list[Connection] = []
        place = ProcessSpec(0, config, model, reference, Path(folder) / "meeting", threads)
        for rank in range(1, config.processes):
            here, there = spawning.Pipe()
            where = ProcessSpec(rank, config, model, reference, place.meeting, threads)
            process = spawning.Process(target=_take_part, args=(where, there), daemon=True, name=f"polar-train-{rank}")
            process.start()
            there.close()
            stack.callback(_end, process)
            stack.callback(here.close)
            pipes.append(here)
        for rank, pipe in enumerate(pipes, start=1):
            try:
                pipe.recv()
            except EOFError:
                raise TrainingError(f"process {rank} of {config.processes} did not come up") from None
        stack.callback(_leave_group)
        yield ShardedCoordinator(place, pipes)


def _take_part(place: ProcessSpec, pipe: Connection) -> None:
    """A process of its own: do what the first one says, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # goes to all processes of a terminal; the first one sees to it
    torch.set_num_threads(place.threads)
    try:
        pipe.send(None)  # it runs: what goes wrong from here on, it can tell
        learner = ShardedLearner(place)
        while True:
            name, arguments = pipe.recv()
            told = None
            try:
                getattr(learner, name)(*arguments)
            except TrainingError as error:
                told = str(error)
            pipe.send(told)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is over
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
        raise


def _end(process: Any) -> None:
    """Gently: it ends by itself when its pipe is closed, unless it waits within a collective operation."""
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _sharded(model: Any, mesh: Any) -> Any:
    """Every block of the model is gathered by itself, when it computes; embeddings, norm and head with the root."""
    from torch.distributed.fsdp import fully_shard

    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    # The root gives its own up as well behind every forward pass: one without a backward pass would leave them whole.
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _whole(value: Any) -> Any:
    """A copy: what stays here goes on changing."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor().cpu()
    return value.clone() if isinstance(value, Tensor) else value


def _outline(optimiser: Mapping[str, Any], *, with_tensors: bool) -> Json:
    """An optimiser's state for `take`: with what is sharded like its parameter, or with None for it."""
    state = {}
    for index, values in optimiser["state"].items():
        single = [name for name, value in values.items() if not isinstance(value, Tensor) or value.ndim == 0]
        kept = {name: value if with_tensors or name in single else None for name, value in values.items()}
        state[index] = {"values": kept, "as_it_is": single}
    return {**optimiser, "state": state}
