"""verl on recorded groups: the dataset, and the agent loop that answers each session with a recorded rollout.

    polar run swe-task --instances 16 --samples 4
    polar export --format tokens-jsonl --out rows.jsonl
    python examples/verl/prepare.py rows.jsonl --out verl_data      # also prints the command for verl

verl (0.9.1, its V1 trainer) requests `rollout.n` sessions of every prompt from the agent loop; session i is the i-th
rollout of the group with all its sequences, and counts once in the baseline. With verl installed, the script also reads
one answer through verl's own `AgentLoopOutput`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from polar_proxy.export.formats import read_jsonl, verl

COMMAND = """python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  data.train_files={dataset} data.val_files={dataset} data.filter_overlong_prompts=False \\
  data.max_prompt_length={prompt} data.max_response_length={response} \\
  actor_rollout_ref.rollout.n={n} actor_rollout_ref.rollout.calculate_log_probs=True \\
  actor_rollout_ref.rollout.agent.agent_loop_config_path={loops} \\
  algorithm.rollout_correction.bypass_mode=True actor_rollout_ref.model.path=MODEL ..."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="written by polar export --format tokens-jsonl")
    parser.add_argument("--out", type=Path, default=Path("verl_data"))
    arguments = parser.parse_args()

    rows = list(read_jsonl(arguments.rows))
    dataset = verl.dataset(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, loops = arguments.out / "groups.jsonl", arguments.out / "agent_loops.yaml"
    path.write_text("".join(json.dumps(row) + "\n" for row in dataset))
    target = "polar_proxy.export.formats.verl_loop.RecordedAgentLoop"
    loops.write_text(f"- name: {verl.AGENT_NAME}\n  _target_: {target}\n  rows: {arguments.rows.absolute()}\n")

    recorded = verl.RecordedGroups(rows)
    size = dataset[0]["extra_info"]["rollouts"]
    answers = [answer for row in dataset for i in range(size) for answer in recorded.session(row["extra_info"], i)]
    print(f"{len(dataset)} groups of {size} rollouts, {len(answers)} sequences")
    if importlib.util.find_spec("verl") is not None:
        fields = verl.outputs(answers[:1])[0].as_dict()
        print({name: tuple(value.shape) for name, value in fields.items() if hasattr(value, "shape")})
    lengths = [max(len(answer[name]) for answer in answers) for name in ("prompt_ids", "response_ids")]
    print(COMMAND.format(dataset=path, loops=loops, n=size, prompt=lengths[0], response=lengths[1]))


if __name__ == "__main__":
    main()
