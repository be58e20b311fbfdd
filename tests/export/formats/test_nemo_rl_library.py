"""NeMo-RL's own code flattens the message logs and makes its masks. Marked `full`.

It is not on the package index: put a checkout on the path, `PYTHONPATH=NeMo-RL pytest -m full ...`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polar_proxy.export.formats import RecordConverter, nemo_rl, read_training_row
from tests.export.formats.row_factory import group

pytestmark = pytest.mark.full
WHY = "needs a checkout of NeMo-RL on PYTHONPATH"


def module(name: str) -> Any:
    return pytest.importorskip(name, reason=WHY, exc_type=ImportError)


def test_nemo_rl_flattens_and_masks_to_the_recorded_row() -> None:
    messages = module("nemo_rl.data.llm_message_utils")
    masks = module("nemo_rl.algorithms.grpo").add_grpo_token_loss_masks_and_generation_logprobs
    records = RecordConverter("nemo-rl")
    for one in group():
        read = read_training_row(one)
        loaded = nemo_rl.load(records([one])[0], temperature=1.0)
        masks([loaded["message_log"]])
        flat = messages.message_log_to_flat_messages(loaded["message_log"])
        assert flat["token_ids"].tolist() == list(read.token_ids)
        assert len(flat["token_ids"]) == loaded["length"]
        assert flat["token_loss_mask"].tolist() == [0] * 3 + list(read.loss_mask)
        np.testing.assert_array_equal(
            flat["generation_logprobs"].numpy(), np.array([0.0] * 3 + list(read.logprobs), dtype=np.float32)
        )
