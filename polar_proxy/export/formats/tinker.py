"""Tinker: a row becomes a `Datum`, with tokens shifted by one. Each target has its recorded log-probability and an
advantage.

A datum is for the losses `importance_sampling`, `ppo`, `cispo` and `gspo`. The advantage is 0 where nothing was
sampled, so that such a position adds nothing to the loss, whatever its log-probability. These losses compute
log-probabilities at temperature 1, so rows of another temperature are refused.

Source: tinker 0.38, `types/datum.py`, `tensor_data.py`.
"""

from __future__ import annotations

from typing import Any

from polar_proxy.export.formats.training_rows import TrainingRow, require_advantage, require_temperature
from polar_proxy.types import Json


def datum(row: TrainingRow) -> Json:
    """Return a datum as JSON: n tokens give n - 1 inputs and n - 1 targets. Raise RowError if the row has no
    advantage, or if its temperature is not 1."""
    require_temperature(row, 1.0)
    advantage, prompt, ids = require_advantage(row), len(row.prompt_ids), row.token_ids
    mask = [0] * prompt + list(row.loss_mask)
    logprobs = [0.0] * prompt + list(row.logprobs)
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(ids[:-1])}]},
        "loss_fn_inputs": {
            "target_tokens": _tensor(list(ids[1:]), "int64"),
            "logprobs": _tensor(logprobs[1:], "float32"),
            "advantages": _tensor([advantage if bit else 0.0 for bit in mask[1:]], "float32"),
        },
    }


def load(record: Json) -> Any:
    """Return a record as `tinker.Datum` (needs `pip install tinker`)."""
    import tinker

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(record["model_input"]["chunks"][0]["tokens"]),
        loss_fn_inputs={name: tinker.TensorData(**tensor) for name, tensor in record["loss_fn_inputs"].items()},
    )


def _tensor(data: list[Any], dtype: str) -> Json:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}
