"""slime's and Miles' own `Sample` reads the records. Marked `full`.

Neither is on the package index: put a checkout on the path, `PYTHONPATH=slime:miles pytest -m full ...`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polar_proxy.export.formats import RecordConverter, read_training_row, slime, with_advantages
from tests.export.formats.row_factory import group, row

pytestmark = pytest.mark.full
ARGS = SimpleNamespace(reward_key=None, grpo_std_normalization=True)


@pytest.fixture(params=["slime", "miles"])
def kind(request: pytest.FixtureRequest) -> Any:
    name = f"{request.param}.utils.types"
    pytest.importorskip(name, reason=f"needs a checkout of {request.param} on PYTHONPATH", exc_type=ImportError)
    return importlib.import_module(name).Sample


def test_their_manager_loads_a_debug_rollout(tmp_path: Path, kind: Any) -> None:
    """`--load-debug-rollout-data`: torch.load, then `Sample.from_dict` of each."""
    records, rows = RecordConverter("slime"), [row(0, 0), row(0, 1), row(0, 1, 1), row(0, 2, masked=True)]
    made = [*records(rows[:1]), *records(rows[1:3]), *records(rows[3:])]
    torch.save(slime.debug_data(made), tmp_path / "rollout_0.pt")
    loaded = torch.load(tmp_path / "rollout_0.pt", weights_only=False)["samples"]
    samples = [kind.from_dict(one) for one in loaded]
    for sample, one in zip(samples, rows, strict=True):
        read = read_training_row(one)
        if hasattr(sample, "validate"):
            sample.validate()
        assert sample.tokens[-sample.response_length :] == list(read.response_ids)
        assert sample.effective_response_length == sum(read.loss_mask) == 5
        assert [value for value, bit in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if bit] == [
            value for value, bit in zip(read.logprobs, read.loss_mask, strict=True) if bit
        ]
        assert sample.status in (kind.Status.COMPLETED, kind.Status.TRUNCATED)
    assert [sample.rollout_id for sample in samples] == [0, 1, 1, 2]
    assert [sample.remove_sample for sample in samples] == [False, False, False, True]


def test_reward_post_process_gives_polars_advantages(kind: Any) -> None:
    """`--custom-reward-post-process-path` gives GRPO advantages with each rollout counted once, on their own
    samples."""
    rows = [*group(), row(0, 1, 1)]
    records = RecordConverter("slime")
    samples = [
        kind.from_dict(one) for one in (*(made for each in rows[:4] for made in records([each])), *records(rows[4:]))
    ]
    raw, made = slime.reward_post_process(ARGS, samples)
    assert raw == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert made == pytest.approx([one["advantage"] for one in with_advantages(rows)], rel=1e-6)
