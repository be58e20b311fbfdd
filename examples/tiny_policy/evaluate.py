"""Measures a policy on unseen instances without harness and gateway, to choose among checkpoints.

All rollouts share one KV cache that grows turn by turn, exactly as `continue` mode feeds an engine: the sampled tokens
stay, and only the tokens of the observation are added. Commands really run in temporary directories, and the hidden
tests decide. The official success rate is measured with `polar run`.

    python -m examples.tiny_policy.evaluate --model out/tiny/step-01000 --tokenizer polar_proxy/assets/polar_tiny
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, Qwen3ForCausalLM

from examples.tiny_policy.dialogues import TOOLS, Workspace, observation, opening, some_system
from examples.tiny_policy.expert import SUBMIT
from polar_proxy.tasks import get_source

MAX_STEPS = 8
MAX_ANSWER = 120
_FORMAT_ERROR = (
    "Tool call error:\n\n<error>\n{error}\n</error>\n\nHere is general guidance on how to submit correct toolcalls:\n\n"
    "Every response needs to use the 'bash' tool at least once to execute commands.\n\n"
    "Call the bash tool with your command as the argument:\n- Tool: bash\n"
    '- Arguments: {"command": "your_command_here"}\n\nIf you want to end the task, please issue the following '
    "command: `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`\nwithout any other command."
)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927, score interval)."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    denominator = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / denominator
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / denominator
    return centre - half, centre + half


@dataclass
class Rollout:
    """One attempt in progress."""

    seed: int
    workspace: Workspace
    feed: list[int]
    """Token ids that the model has not read yet."""
    position: int = 0
    """Number of tokens read so far."""
    answer: list[int] = field(default_factory=list)
    steps: int = 0
    bad: int = 0
    """Number of format errors since the last valid answer."""
    ending: str | None = None
    log: list[str] = field(default_factory=list)


class Batch:
    """A batch of rollouts over one growing cache; rows that have nothing to read are masked out."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.mask = torch.zeros(rows, 0, dtype=torch.long)

    def read(self, feeds: Sequence[Sequence[int]], positions: Sequence[int]) -> torch.Tensor:
        """Read `feeds[row]`, which starts at `positions[row]`; return logits after the last token, [rows, vocab]."""
        width = max(len(feed) for feed in feeds)
        ids = torch.zeros(len(feeds), width, dtype=torch.long)
        places = torch.zeros(len(feeds), width, dtype=torch.long)
        mask = torch.zeros(len(feeds), width, dtype=torch.long)
        for row, feed in enumerate(feeds):
            if feed:
                ids[row, -len(feed) :] = torch.tensor(feed)
                places[row, -len(feed) :] = torch.arange(positions[row], positions[row] + len(feed))
                mask[row, -len(feed) :] = 1
        self.mask = torch.cat([self.mask, mask], dim=1)
        with torch.no_grad():
            out = self.model(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=places,
                past_key_values=self.cache,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def run(model: Any, tokenizer: Any, seeds: Sequence[int], temperature: float, seed: int) -> list[Rollout]:
    """Play `seeds` in one batch and return the finished rollouts; `ending` is ``solved`` or the reason of failure."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    source = get_source("swe-task")
    with ExitStack() as stack:
        rollouts = []
        for number in seeds:
            task = source.task(number)
            messages = opening(task.instruction, some_system(rng))
            text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
            rollouts.append(Rollout(number, stack.enter_context(Workspace(task)), encode(text)))
        batch = Batch(model, len(rollouts))
        while any(r.ending is None for r in rollouts):
            feeds = [r.feed if r.ending is None else [] for r in rollouts]
            logits = batch.read(feeds, [r.position for r in rollouts])
            shares = torch.softmax(logits / temperature, dim=-1)
            drawn = torch.multinomial(shares, 1, generator=generator)[:, 0].tolist()
            for rollout, token in zip(rollouts, drawn, strict=True):
                if rollout.ending is not None:
                    continue
                if not rollout.feed:
                    raise AssertionError("a live rollout has nothing to read")
                rollout.position += len(rollout.feed)
                rollout.answer.append(token)
                rollout.feed = [token]
                if token == end or len(rollout.answer) >= MAX_ANSWER:
                    _act(rollout, tokenizer, encode, cut=token != end)
    return rollouts


def _act(rollout: Rollout, tokenizer: Any, encode: Any, *, cut: bool) -> None:
    """Run the command of the finished answer, and put the observation into `feed`."""
    text = tokenizer.decode(rollout.answer).removesuffix("<|im_end|>")
    rollout.answer = []
    rollout.steps += 1
    rollout.log.append(text)
    command, error = _command(text)
    if command is None:
        rollout.bad += 1
        message = _FORMAT_ERROR.replace("{error}", error)
        suffix = f"\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        if rollout.bad >= 3:
            rollout.ending = "format errors"
    else:
        rollout.bad = 0
        output, code, exception = rollout.workspace.run(command)
        if output.lstrip().startswith(SUBMIT.split()[1]) and code == 0:
            rollout.ending = "solved" if rollout.workspace.solved() else "wrong"
        content = observation(output, code, "", exception)["content"]
        rollout.log.append(content)
        suffix = f"\n<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    if rollout.ending is None and (rollout.steps >= MAX_STEPS or cut):
        # The tests judge the state of the workspace, submitted or not.
        rollout.ending = "solved" if rollout.workspace.solved() else "step limit"
    rollout.feed = rollout.feed + encode(suffix)


def _command(text: str) -> tuple[str | None, str]:
    """Return the command of an answer, or None and the error that mini-swe-agent would report."""
    start = text.find("<tool_call>")
    if start < 0:
        return None, "No tool calls found in the response. Every response MUST include at least one tool call."
    body = text[start + len("<tool_call>") :].partition("</tool_call>")[0]
    try:
        call = json.loads(body)
        if call["name"] == "bash" and isinstance(call["arguments"]["command"], str):
            return call["arguments"]["command"], ""
    except (ValueError, KeyError, TypeError):
        pass
    return None, "No tool calls found in the response. Every response MUST include at least one tool call."


def main() -> None:
    parser = argparse.ArgumentParser(description="Success rate of a policy, offline.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--first-seed", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")
    parser.add_argument("--verbose", action="store_true", help="print what failed rollouts did")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    model = Qwen3ForCausalLM.from_pretrained(args.model).eval()
    done: list[Rollout] = []
    for start in range(0, args.count, args.batch):
        seeds = range(args.first_seed + start, args.first_seed + min(start + args.batch, args.count))
        done += run(model, tokenizer, seeds, args.temperature, args.seed + start)
    if args.verbose:
        for rollout in done:
            if rollout.ending != "solved":
                print(f"--- {rollout.seed} {rollout.ending}", *rollout.log, sep="\n", file=sys.stderr)
    solved = sum(rollout.ending == "solved" for rollout in done)
    low, high = wilson(solved, len(done))
    endings = dict(Counter(rollout.ending for rollout in done))
    steps = sum(rollout.steps for rollout in done) / len(done)
    report = {"solved": solved, "of": len(done), "rate": solved / len(done), "interval": [low, high]}
    print(json.dumps(report | {"endings": endings, "mean_steps": steps}))


if __name__ == "__main__":
    main()
