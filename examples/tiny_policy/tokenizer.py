"""Makes polar-tiny's tokenizer: byte-level BPE with about a thousand entries.

The pre-tokenizer decides what a small model can learn to copy. Runs of letters stand alone, without the space,
quote or slash before them, so that a name is the same tokens wherever it stands; the JSON escapes `\\n`, `\\t`
and `\\"`, which mini-swe-agent's observations are full of, are cut off from the word that follows; digits are
single. Merges rarer than `MIN_FREQUENCY` are not made: the words of the prompt and the syllables of the names are
above it, pairs of syllables below, so that no name has tokens that are seen once in a thousand dialogues.

    python -m examples.tiny_policy.tokenizer --out polar_proxy/models/polar_tiny
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.tiny_policy.dialogues import PROMPT, opening, play_expert, some_system
from polar_proxy.tasks import get_source
from polar_proxy.tasks.swe_task import TRAIN_SEEDS

MIN_FREQUENCY = 300
MAX_VOCABULARY = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_PATTERN = r'\\u[0-9a-fA-F]{4}|\\[ntr"\\]|\p{L}+|\p{N}|\\|[^\p{L}\p{N}\\]+'


def corpus(dialogues: int) -> Iterator[str]:
    """Texts to train on: the prompt, whole dialogues and repositories from training seeds."""
    source, rng = get_source("swe-task"), random.Random("tokenizer/1")
    for _ in range(2 * MIN_FREQUENCY):
        yield PROMPT["system"] + PROMPT["user"] + json.dumps(PROMPT["tools"])
        yield (Path(__file__).parent / "chat_template.jinja").read_text()
    for index in range(dialogues):
        task = source.task(TRAIN_SEEDS.start + 500_000_000 + index)
        yield opening(task.instruction, some_system(rng))[1]["content"][:300]
        for message in play_expert(task, some_system(rng), rng)[2:]:
            yield message.get("content") or message["reasoning_content"]
            for call in message.get("tool_calls", ()):
                yield call["function"]["arguments"]
        yield from task.files.values()


def train(dialogues: int = 4000) -> Tokenizer:
    """Train the tokenizer; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY - len(MARKS),
        min_frequency=MIN_FREQUENCY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(dialogues), trainer)
    # Like Qwen3: the marks are single tokens, but ordinary text, so that parsers find them in decoded answers.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) the way Transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 65536,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": (Path(__file__).parent / "chat_template.jinja").read_text().rstrip("\n"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    save(train(), parser.parse_args().out)


if __name__ == "__main__":
    main()
