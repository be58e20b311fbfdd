"""Carries weights over to a changed tokenizer: tokens spelled alike keep their embedding, new ones start at random.

python -m examples.tiny_policy.carry_over out/tiny/step-00600 --old-tokenizer OLD --new-tokenizer NEW --out out/warm
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM


def vocabulary(folder: Path) -> dict[str, int]:
    """Entry -> id, added tokens included."""
    data = json.loads((folder / "tokenizer.json").read_text())
    entries: dict[str, int] = dict(data["model"]["vocab"])
    return entries | {token["content"]: token["id"] for token in data["added_tokens"]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Carry weights over to a changed tokenizer.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--old-tokenizer", type=Path, required=True)
    parser.add_argument("--new-tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    old, new = vocabulary(args.old_tokenizer), vocabulary(args.new_tokenizer)
    model = Qwen3ForCausalLM.from_pretrained(args.model)
    before = model.model.embed_tokens.weight.data
    generator = torch.Generator().manual_seed(0)
    after = torch.randn(len(new), before.shape[1], generator=generator) * before.std()
    for token, index in new.items():
        if token in old:
            after[index] = before[old[token]]
    model.resize_token_embeddings(len(new))
    model.model.embed_tokens.weight.data.copy_(after)
    model.tie_weights()
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
