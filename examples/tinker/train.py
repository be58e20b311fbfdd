"""Tinker on recorded groups: builds its `Datum`s, and takes one step if you have a key.

    polar run swe-task --instances 2 --samples 4
    polar export --format tinker --advantage grpo --out datums.jsonl
    pip install tinker==0.38.0
    python examples/tinker/train.py datums.jsonl                          # builds the datums, sends nothing
    TINKER_API_KEY=... python examples/tinker/train.py datums.jsonl --base-model NAME

The log-probabilities are the recorded ones, so the loss uses importance ratios to the policy that sampled. Train the
base model whose tokenizer produced the token ids.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tinker

from polar_proxy.export.formats import read_jsonl
from polar_proxy.export.formats import tinker as bridge


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("datums", type=Path, help="written by polar export --format tinker")
    parser.add_argument("--base-model", help="take a step with this model of Tinker")
    parser.add_argument("--rank", type=int, default=32)
    arguments = parser.parse_args()

    data = [bridge.load(record) for record in read_jsonl(arguments.datums)]
    trained = sum(int((datum.loss_fn_inputs["advantages"].to_numpy() != 0).sum()) for datum in data)
    print(f"{len(data)} datums, {sum(datum.model_input.length for datum in data)} tokens, {trained} with an advantage")
    if arguments.base_model is None:
        return
    client = tinker.ServiceClient().create_lora_training_client(base_model=arguments.base_model, rank=arguments.rank)
    print(client.forward_backward(data, loss_fn="importance_sampling").result().metrics)
    print(client.optim_step(tinker.AdamParams(learning_rate=1e-5)).result())


if __name__ == "__main__":
    main()
