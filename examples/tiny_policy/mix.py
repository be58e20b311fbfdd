"""Interpolates between two checkpoints of one run: `(1 - share) * first + share * second`, weight by weight.

A policy goes from a third of the instances to two thirds within fifty steps; interpolation selects a point in between
more finely than frequent checkpoints.

    python -m examples.tiny_policy.mix out/tiny/step-00975 out/tiny/step-01000 --share 0.3 --out out/tiny/mixed
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from transformers import Qwen3ForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Mix the weights of two checkpoints.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, required=True, help="share of the second")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer is copied beside the weights")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = Qwen3ForCausalLM.from_pretrained(args.first)
    first, second = model.state_dict(), Qwen3ForCausalLM.from_pretrained(args.second).state_dict()
    model.load_state_dict({key: first[key].lerp(second[key], args.share) for key in first})
    model.save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json") if args.tokenizer else ():
        shutil.copy(args.tokenizer / name, args.out / name)


if __name__ == "__main__":
    main()
