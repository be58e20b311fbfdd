"""Trains polar-tiny from scratch on a CPU, on demonstrations that Polar recorded and exported as tokens-jsonl.

Stages, all with the same loss (cross-entropy with the weights of `data.py`): `copy` of random stretches, then the
recorded dialogues in the forms `short`, `partial` and `full`, renamed afresh each time they are drawn. Hidden matrices
are trained with Muon, the rest with AdamW; the learning rate rises over the first steps and falls linearly to a tenth
over all of them.

    python -m examples.tiny_policy.train demonstrations.jsonl --model polar_proxy/assets/polar_tiny --out out/tiny
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_policy.data import Encoder, Example, Renamer, copies, dialogues
from examples.tiny_policy.muon import Muon
from examples.tiny_policy.verify_export import read_rows
from polar_proxy.tasks.swe_task import SYLLABLES

HELD_OUT_SEEDS = 900_000_000


def new_model(tokenizer: Any, seed: int) -> Any:
    """Return an untrained polar-tiny: Qwen3, 4 layers, width 192, tied embeddings, fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65536,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def collate(batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad on the right to (ids, positions, weights), each [batch, longest]; causal attention needs no mask."""
    longest = max(len(sequence.ids) for sequence in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    positions = torch.zeros(len(batch), longest, dtype=torch.long)
    weights = torch.zeros(len(batch), longest)
    for row, sequence in enumerate(batch):
        size = len(sequence.ids)
        ids[row, :size] = torch.from_numpy(sequence.ids)
        positions[row, :size] = torch.from_numpy(sequence.positions)
        weights[row, :size] = torch.from_numpy(sequence.weights)
    return ids, positions, weights


def losses(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood (nats) of ids[:, 1:], shape [batch, longest - 1]."""
    # The mask is all ones: without one, Transformers takes a jump in the positions for the start of a new sequence.
    out = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    return F.cross_entropy(out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def evaluate(model: Any, held_out: Sequence[Example]) -> dict[str, float]:
    """Score unseen dialogues, teacher-forced.

    `loss` (nats per assistant token), `right` (share of assistant tokens that are the most likely one), `path` (mean
    probability of sampling the expert's whole dialogue, its free choices included: a lower bound of success).
    """
    total, right, count, paths = 0.0, 0.0, 0, []
    for start in range(0, len(held_out), 8):
        ids, positions, weights = collate(held_out[start : start + 8])
        mask = torch.ones_like(ids)
        with torch.no_grad():
            out = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        logits = out.logits[:, :-1]
        answer = weights[:, 1:] == 1.0
        nll = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none") * answer
        total += float(nll.sum())
        right += float(((logits.argmax(-1) == ids[:, 1:]) & answer).sum())
        count += int(answer.sum())
        paths += torch.exp(-nll.sum(1)).tolist()
    return {"loss": total / count, "right": right / count, "path": float(np.mean(paths))}


def optimisers(model: Any, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        Muon(matrices, lr=muon_rate, decay=0.01),
        torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def batches(
    sequences: Sequence[Example], size: int, rng: random.Random, form: Callable[[Example], Example]
) -> Iterator[list[Example]]:
    """Yield batches of sequences of similar length in the given form without end, each epoch in a new order."""
    while True:
        order = list(range(len(sequences)))
        rng.shuffle(order)
        for start in range(0, len(order), 16 * size):
            block = sorted(order[start : start + 16 * size], key=lambda i: len(sequences[i].ids))
            groups = [block[i : i + size] for i in range(0, len(block), size)]
            rng.shuffle(groups)
            for group in groups:
                yield [form(sequences[i]) for i in group]


def save(model: Any, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    model.generation_config.update(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=512)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train polar-tiny.")
    parser.add_argument("export", type=Path, help="tokens-jsonl export of the demonstrations")
    parser.add_argument("--model", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--init", type=Path, help="start from these weights")
    parser.add_argument("--out", type=Path, required=True, help="folder of log and checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", default="copy:150,short:300,full:900", help="name:steps, comma separated")
    parser.add_argument("--stop-after", type=int, help="steps after which to stop; the rates are those of all stages")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.004)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoder, rng = Encoder(tokenizer), random.Random(args.seed)
    numbers = np.random.default_rng(args.seed)
    alphabet = np.array(tokenizer.convert_tokens_to_ids([*SYLLABLES, *"0123456789/.(:"]))
    model = Qwen3ForCausalLM.from_pretrained(args.init) if args.init else new_model(tokenizer, args.seed)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    held_out = list(dialogues(encoder, HELD_OUT_SEEDS, 48))
    whole = [encoder.from_ids(row["prompt_ids"] + row["response_ids"]) for row in read_rows(args.export)]
    lengths = [len(example.ids) for example in whole]
    print(f"{len(whole)} recorded dialogues of {min(lengths)} to {max(lengths)} tokens", flush=True)
    rename = Renamer(encoder, rng)
    forms: dict[str, Callable[[Example], Example]] = {
        "short": lambda example: encoder.short(rename(example), rng),
        "partial": lambda example: encoder.partial(rename(example), rng),
        "full": lambda example: encoder.shifted(rename(example), rng),
    }
    stages = [(name, int(steps)) for name, _, steps in (part.partition(":") for part in args.stages.split(","))]
    total = sum(steps for _, steps in stages)
    chosen = optimisers(model, args.muon_rate, args.adam_rate)
    peaks = [group["lr"] for optimiser in chosen for group in optimiser.param_groups]
    step, started = 0, time.time()
    for name, steps in stages:
        feed = iter(()) if name == "copy" else batches(whole, args.batch, rng, forms[name])
        for _ in range(steps):
            batch = copies(numbers, 24, alphabet) if name == "copy" else next(feed)
            rate = min(1.0, (step + 1) / 30) * max(0.1, 1.0 - 0.9 * step / total)
            for group, peak in zip([g for o in chosen for g in o.param_groups], peaks, strict=True):
                group["lr"] = peak * rate
            ids, positions, weights = collate(batch)
            loss = (losses(model, ids, positions) * weights[:, 1:]).sum() / weights[:, 1:].sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimiser in chosen:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            step += 1
            if step % 20 == 0:
                print(f"{step} {name} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
            last = step == (args.stop_after or total)
            if step % args.save_every == 0 or last:
                row = {"step": step, "stage": name, "seconds": round(time.time() - started)}
                row |= evaluate(model, held_out)
                print(json.dumps(row), flush=True)
                with (args.out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(row) + "\n")
                save(model, args.out / f"step-{step:05d}")
            if last:
                return


if __name__ == "__main__":
    main()
