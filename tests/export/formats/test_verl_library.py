"""verl's own code reads the records: agent loop outputs, post-processing, dataset, advantages. Marked `full`.

pip install verl==0.9.1 && pytest -m full tests/export/formats/test_verl_library.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.export.formats import read_training_row, verl, with_advantages
from polar_proxy.types import Json
from tests.export.formats.row_factory import group, row

loops = pytest.importorskip(
    "verl.experimental.agent_loop.agent_loop",
    reason="needs verl: pip install verl==0.9.1 TransferQueue",
    exc_type=ImportError,
)
pytestmark = pytest.mark.full
ROWS = [*group(0), row(0, 2, 1), *group(1)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """(rows of tokens-jsonl, dataset)"""
    rows, dataset = tmp_path / "rows.jsonl", tmp_path / "dataset.jsonl"
    for path, lines in ((rows, ROWS), (dataset, verl.dataset(ROWS))):
        path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return rows, dataset


def test_outputs_become_verls_tensors() -> None:
    (made,) = verl.outputs([verl.agent_loop_output(read_training_row(row(0, 1)))])
    assert isinstance(made, loops.AgentLoopOutput)
    fields = made.as_dict()
    assert fields["prompts"].tolist() == [11, 12, 13]
    assert fields["responses"].tolist() == [30, 21, 31, 32, 22, 23, 24]
    assert fields["response_mask"].tolist() == [1, 1, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(
        fields["rollout_log_probs"].numpy(), np.array([-0.51, -0.25, 0, 0, -1.5, -2.0, -0.125], dtype=np.float32)
    )
    assert fields["rm_scores"].tolist() == [0, 0, 0, 0, 0, 0, 1.0]


def dataset_of(path: Path) -> Any:
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"max_prompt_length": 512, "cache_dir": str(path.parent / "cache")})
    return RLHFDataset(str(path), AutoTokenizer.from_pretrained(POLAR_TINY), config)


async def answers(rows: Path, one: Json, session: int) -> list[Any]:
    """Call the agent loop like verl's worker: by the configured class, with the dataset's columns and the session."""
    from polar_proxy.export.formats.verl_loop import RecordedAgentLoop

    loop = RecordedAgentLoop.__new__(RecordedAgentLoop)  # the base class needs the configuration of a cluster
    loop._rows = str(rows)
    found: list[Any] = await loop.run({}, session_id=session, **one)
    return found


async def test_dataset_and_agent_loop_give_each_session_its_rollout(files: tuple[Path, Path]) -> None:
    rows, path = files
    dataset = dataset_of(path)
    assert len(dataset) == 2
    one = dataset[0]
    assert (one["agent_name"], one["raw_prompt"][0]["content"]) == (verl.AGENT_NAME, "task_0")
    names = [[output.extra_fields["trace_id"] for output in await answers(rows, one, i)] for i in range(4)]
    assert names == [["trace_0_0_0"], ["trace_0_1_0"], ["trace_0_2_0", "trace_0_2_1"], ["trace_0_3_0"]]


async def test_verls_padding_keeps_every_value(files: tuple[Path, Path]) -> None:
    """`_agent_loop_postprocess` and `_postprocess` of its worker, on the outputs of one group."""
    from transformers import AutoTokenizer

    rows, path = files
    one = dataset_of(path)[1]
    worker = SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(POLAR_TINY),
        processor=None,
        rollout_config=SimpleNamespace(prompt_length=5, response_length=9),
        reward_loop_worker_handles=None,
        distillation_enabled=False,
    )
    kind = loops.AgentLoopWorker
    for name in ("_pad_token_ids", "_compute_multi_modal_inputs", "_compute_position_ids", "_get_mm_processor_kwargs"):
        setattr(worker, name, getattr(kind, name).__get__(worker))
    worker.mm_processor_kwargs = {}

    async def nothing(*_: Any, **__: Any) -> None: ...

    worker._compute_score = worker._compute_teacher_logprobs = nothing
    padded = []
    for session in range(4):
        for output in await answers(rows, one, session):
            padded.append(await kind._agent_loop_postprocess(worker, output, False, raw_prompt=one["raw_prompt"]))
    batch = kind._postprocess(worker, padded).batch
    for number in range(4):
        ids = [0, 0, 11, 12, 13]
        assert batch["attention_mask"][number].tolist() == [0, 0, 1, 1, 1] + [1] * 7 + [0, 0]
        assert batch["prompts"][number][2:].tolist() == ids[2:]
        assert batch["response_mask"][number].tolist() == [1, 1, 0, 0, 1, 1, 1, 0, 0]
        expected = read_training_row(row(1, number))
        assert batch["responses"][number][:7].tolist() == list(expected.response_ids)
        assert batch["rollout_log_probs"][number].tolist() == pytest.approx([*expected.logprobs, 0.0, 0.0])
        assert batch["rm_scores"][number].sum() == number % 2


def test_verls_advantages_equal_polars() -> None:
    """verl's GRPO over the sessions of one prompt, of which one has two outputs."""
    from verl import DataProto

    utils = pytest.importorskip("verl.trainer.ppo.v1.utils", reason="needs TransferQueue: pip install TransferQueue")

    recorded = verl.RecordedGroups(ROWS)
    keys, tensors = [], []
    for session in range(4):
        for index, output in enumerate(verl.outputs(recorded.session({"group_id": "group_0"}, session))):
            keys.append(f"group_0_{session}_{index}")
            tensors.append(output.as_dict())
    rewards = torch.stack([one["rm_scores"] for one in tensors])
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.stack([one["response_mask"] for one in tensors]),
            "token_level_rewards": rewards,
        },
        non_tensors={"uid": np.array(["group_0"] * len(keys), dtype=object)},
    )
    made = utils.compute_advantage_for_multi_trajectories(data, keys, "grpo", num_repeat=4).batch["advantages"]
    ours = {one["trace_id"]: one["advantage"] for one in with_advantages(ROWS[:5])}
    for number, trace in enumerate(("trace_0_0_0", "trace_0_1_0", "trace_0_2_0", "trace_0_2_1", "trace_0_3_0")):
        wanted = [ours[trace] if bit else 0.0 for bit in (1, 1, 0, 0, 1, 1, 1)]
        assert made[number].tolist() == pytest.approx(wanted, abs=1e-5)
