"""NeMo-RL: one rollout as a `DatumSpec`. Its message log has token ids, as in NeMo-RL's own rollouts.

NeMo-RL trains the messages of role `assistant` that carry `generation_logprobs`. The response is therefore cut where
the mask changes, not where messages begin. Each run of sampled tokens is an assistant message, each run of other tokens
an environment message. Records: NeMo-RL `data/interfaces.py` (`DatumSpec`), `data/llm_message_utils.py`,
`algorithms/grpo.py`.
"""

from __future__ import annotations

from typing import Any

from polar_proxy.export.formats.training_rows import TrainingRow, require_reward, require_same_temperature
from polar_proxy.traces.rows import RowError
from polar_proxy.types import Json


def datum_spec(rows: list[TrainingRow], idx: int = 0) -> Json:
    """Return one rollout as JSON, which `load` converts to tensors. `total_reward` is an addition to DatumSpec's
    fields.

    A masked rollout has `loss_multiplier` 0. Texts are empty, because NeMo-RL trains on the ids. Raise RowError for a
    rollout without a reward, and for a rollout with several sequences, because NeMo-RL's baseline would count it
    several times.
    """
    if len(rows) > 1:
        raise RowError(
            "several_traces", f"the rollout {rows[0].rollout_id} has {len(rows)} sequences, and a DatumSpec holds one"
        )
    row = rows[0]
    messages: list[Json] = [{"role": "user", "content": "", "token_ids": list(row.prompt_ids)}]
    for sampled, start, end in row.runs():
        message: Json = {"role": "assistant" if sampled else "environment", "content": ""}
        message["token_ids"] = list(row.response_ids[start:end])
        if sampled:
            message["generation_logprobs"] = list(row.logprobs[start:end])
        messages.append(message)
    return {
        "message_log": messages,
        "length": len(row.token_ids),
        "extra_env_info": {
            "trace_id": row.trace_id,
            "rollout_id": row.rollout_id,
            "group_id": row.group_id,
            "task_id": row.task_id,
            "temperature": row.temperature,
        },
        "loss_multiplier": 0.0 if row.masked else 1.0,
        "idx": idx,
        "task_name": "polar",
        "total_reward": require_reward(row),
    }


def load(record: Json, *, temperature: float) -> Json:
    """Return the record with tensors in its messages: `token_ids` int64 and, in assistant messages,
    `generation_logprobs` float32, both [tokens of the message].

    `temperature`: the trainer's (`policy.generation.temperature`). Raise RowError if the record's temperature
    differs.
    """
    import torch

    sampled_at = record["extra_env_info"]["temperature"]
    require_same_temperature(f"the record {record['extra_env_info']['trace_id']}", sampled_at, temperature)

    def with_tensors(message: Json) -> dict[str, Any]:
        made: dict[str, Any] = dict(message)
        made["token_ids"] = torch.tensor(message["token_ids"], dtype=torch.int64)
        if "generation_logprobs" in message:
            made["generation_logprobs"] = torch.tensor(message["generation_logprobs"], dtype=torch.float32)
        return made

    return {**record, "message_log": [with_tensors(message) for message in record["message_log"]]}
