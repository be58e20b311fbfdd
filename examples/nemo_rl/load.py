"""NeMo-RL's message logs from recorded groups.

    polar run swe-task --instances 2 --samples 4
    polar export --format nemo-rl --builder merged --out data.jsonl
    python examples/nemo_rl/load.py data.jsonl

Each record is a `DatumSpec` as NeMo-RL's rollouts produce it: sampled spans are assistant messages with
`generation_logprobs`, everything between belongs to the environment. The export skips and counts rollouts with several
sequences, because NeMo-RL's baseline would count them several times. In your own rollout function, return
`datums(...)` as the batch's `message_log`, `total_reward` and `loss_multiplier`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from polar_proxy.export.formats import nemo_rl, read_jsonl


def datums(path: Path, temperature: float) -> list[dict[str, Any]]:
    """Return the records with tensors. `temperature`: NeMo-RL's `policy.generation.temperature`.

    Call NeMo-RL's `add_grpo_token_loss_masks_and_generation_logprobs` on their logs before flattening them.
    """
    return [nemo_rl.load(record, temperature=temperature) for record in read_jsonl(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="written by polar export --format nemo-rl")
    parser.add_argument("--temperature", type=float, default=1.0, help="policy.generation.temperature of NeMo-RL")
    arguments = parser.parse_args()
    for datum in datums(arguments.data, arguments.temperature):
        log = datum["message_log"]
        shape = ", ".join(f"{message['role']} {len(message['token_ids'])}" for message in log)
        print(f"{datum['extra_env_info']['rollout_id']}: reward {datum['total_reward']:g}, {shape}")
        if importlib.util.find_spec("nemo_rl") is not None:
            from nemo_rl.data.llm_message_utils import message_log_to_flat_messages

            assert len(message_log_to_flat_messages(log)["token_ids"]) == datum["length"]


if __name__ == "__main__":
    main()
