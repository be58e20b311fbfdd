"""Check a database of rollouts against a new forward pass, and an export against the database, token for token.

    python scripts/verify_run.py DATABASE MODEL_DIR

For every call: ids and log-probabilities have equal length, and the recorded log-probabilities agree with a
teacher-forced pass of the weights in MODEL_DIR in plain Transformers (fp32). For every trace: its trained tokens are
the completions of its calls. Then `tokens-jsonl` is exported, and each line is compared with the store. Prints one JSON
document; the exit status is 1 if anything disagrees.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from polar_proxy.export.exporter import export
from polar_proxy.store import Store, open_store


@torch.inference_mode()
def forward(model: torch.nn.Module, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Return the raw log-probabilities, float32 [len(answer)], of the answer after the prompt."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))[None]
    logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    picked: np.ndarray = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return picked


async def check(store: Store, model: torch.nn.Module) -> dict[str, object]:
    lines: list[bytes] = []
    await export(store, "tokens-jsonl", lines.append)
    rows = {row["trace_id"]: row for row in map(json.loads, lines)}
    worst, total, tokens, calls_seen, problems = 0.0, 0.0, 0, 0, []
    for rollout in await store.rollouts.find():
        if rollout.session_id is None:
            continue
        calls = await store.calls.of_session(rollout.session_id)
        for call in calls:
            calls_seen += 1
            for choice in call.choices:
                if (
                    call.prompt_ids is None
                    or len(choice.token_ids) != len(choice.logprobs)
                    or not len(choice.token_ids)
                ):
                    problems.append(f"{call.call_id}: ids and log-probabilities do not match")
                    continue
                gap = np.abs(forward(model, call.prompt_ids, choice.token_ids) - choice.logprobs)
                worst, total, tokens = max(worst, float(gap.max())), total + float(gap.sum()), tokens + len(gap)
        by_id = {call.call_id: call for call in calls}
        for trace in await store.traces.find(session_id=rollout.session_id):
            trained = int(trace.loss_mask.sum())
            if trained != sum(len(c.token_ids) for call_id in trace.call_ids for c in by_id[call_id].choices):
                problems.append(f"{trace.trace_id}: trained tokens are not the completions of its calls")
            row = rows.pop(trace.trace_id)
            same = row["prompt_ids"] + row["response_ids"] == trace.token_ids.tolist()
            start = trace.prompt_length
            logprobs = np.array([np.nan if v is None else v for v in row["logprobs"]], dtype=np.float32)
            same = same and row["loss_mask"] == trace.loss_mask[start:].tolist()
            if not same or not np.array_equal(logprobs, trace.logprobs[start:], equal_nan=True):
                problems.append(f"{trace.trace_id}: the exported line differs from the store")
    problems += [f"{trace_id}: exported but not stored" for trace_id in rows]
    return {
        "calls": calls_seen,
        "sampled_tokens": tokens,
        "exported_rows": len(lines),
        "max_logprob_difference": worst,
        "mean_logprob_difference": total / max(1, tokens),
        "problems": problems,
    }


async def main(database: str, model_dir: str) -> int:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    async with open_store(database, create=False) as store:
        found = await check(store, model)
    print(json.dumps(found, indent=2))
    return 1 if found["problems"] or found["max_logprob_difference"] > 1e-3 else 0  # type: ignore[operator]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(asyncio.run(main(*sys.argv[1:])))
