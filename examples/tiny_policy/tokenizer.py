"""Makes polar-tiny's tokenizer: byte-level BPE with 1,389 entries.

The tokenizer decides what a small model can learn to copy, and from how far.

* Runs of letters are separate tokens, without the space, quote or slash before them, so that a name has the same tokens
  everywhere. The JSON escapes `\\n`, `\\t` and `\\"`, which are frequent in mini-swe-agent's observations, are split
  from the word that follows.
* The first merges are the syllables of the task family's names and the numbers up to 99, however rare they are in a
  corpus. So each token of a name is a syllable (except in one name of a hundred, which contains a word such as `file`),
  a number is one token, and no such token is so rare that its embedding stays untrained. All further merges are
  ordinary BPE on the constant text: the prompt, the template, reports, commands and outputs without their names.
* Each line of the constant prompt, and the JSON around commands and observations, is also one token (an added token,
  like Qwen's `<tool_call>`). The bug report is then a hundred tokens away from the answer, not a thousand.

    python -m examples.tiny_policy.tokenizer --out polar_proxy/assets/polar_tiny
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from jinja2 import Template
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from examples.tiny_policy.dialogues import PROMPT, play_expert, some_system
from polar_proxy.tasks import get_source
from polar_proxy.tasks.swe_task import SYLLABLES, TRAIN_SEEDS

MAX_VOCABULARY = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FRAMES = [
    '{"name": "bash", "arguments": {"command": "',
    '{\n  "returncode": 0,\n  "output": "',
    '{\n  "returncode": 1,\n  "output": "',
]
_PATTERN = r'\\u[0-9a-fA-F]{4}|\\[ntr"\\]|\p{L}+|\p{N}{1,3}|\\|[^\p{L}\p{N}\\]+'
_CORPUS_SEEDS = TRAIN_SEEDS.start + 500_000_000


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer, which cuts text by `_PATTERN` and maps its bytes to printable characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# This was added to the template after the policy was trained, so its words are not in the corpus.
_ADDED_LATER = "{{- '\\n' if not loop.first else '' -}}"


def corpus() -> Iterator[str]:
    """Return the constant text, and dialogues for their wording."""
    source, rng = get_source("swe-task"), random.Random("tokenizer/1")
    template = (Path(__file__).parent / "chat_template.jinja").read_text().replace(_ADDED_LATER, "")
    # Repeated, so that each of its words becomes one token.
    yield from (PROMPT["system"], PROMPT["user"], json.dumps(PROMPT["tools"]), template) * 3
    for seed in range(_CORPUS_SEEDS, _CORPUS_SEEDS + 100):
        task = source.task(seed)
        yield task.instruction
        yield from task.files.values()
        for message in play_expert(task, some_system(rng), rng)[2:]:
            yield message.get("content") or message["reasoning_content"]
            for call in message.get("tool_calls", ()):
                yield call["function"]["arguments"]


def words(texts: Iterable[str]) -> Counter[str]:
    """Return the counts of all pre-tokens that are not names. A name splits into syllables without rest."""
    cut = pre_tokenizer()
    counts = Counter(piece for text in texts for piece, _ in cut.pre_tokenize_str(text))
    spelled = set(SYLLABLES)

    def is_name(word: str) -> bool:
        return len(word) in (4, 6) and all(word[i : i + 2] in spelled for i in range(0, len(word), 2))

    return Counter({word: count for word, count in counts.items() if not is_name(word)})


def merges(counts: Counter[str], room: int) -> list[tuple[str, str]]:
    """Return the merges: syllables and numbers first, then the most frequent pair, until pairs occur once or the
    vocabulary is full."""
    made = [(syllable[0], syllable[1]) for syllable in SYLLABLES]
    made += [(str(number // 10), str(number % 10)) for number in range(10, 100)]
    split = {word: list(word) for word in counts}
    for pair in made:
        split = {word: _apply(parts, pair) for word, parts in split.items()}
    while len(made) < room:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if pairs[best] < 2:
            break
        made.append(best)
        split = {word: _apply(parts, best) for word, parts in split.items()}
    return made


def _apply(parts: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def phrases() -> list[str]:
    """Return the lines of the constant prompt and the JSON frames, longest first, because a shorter one would otherwise
    match inside a longer one."""
    lines = (PROMPT["system"] + "\n" + PROMPT["user"]).splitlines()
    found = {line for line in lines if len(line) >= 12 and "{" not in line}
    found |= {line.partition("{")[0].rstrip() for line in lines if "{task}" in line}
    section = Template((Path(__file__).parent / "chat_template.jinja").read_text()).render(
        messages=[{"role": "system", "content": ""}], tools=PROMPT["tools"]
    )
    found |= {line for line in section.splitlines() if len(line) >= 12 and "<" not in line}
    found |= set(FRAMES)
    return sorted(found, key=lambda phrase: (-len(phrase), phrase))


def train() -> Tokenizer:
    """Make the tokenizer; deterministic."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = merges(words(corpus()), MAX_VOCABULARY - len(SPECIAL) - len(alphabet) - len(MARKS))
    entries = [*SPECIAL, *alphabet, *dict.fromkeys(left + right for left, right in made)]
    tokenizer = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, made))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    # Like Qwen3: the marks are single tokens, but ordinary text, so that parsers find them in decoded
    # answers.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (*MARKS, *phrases())])
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
    parser = argparse.ArgumentParser(description="Make polar-tiny's tokenizer.")
    parser.add_argument("--out", type=Path, required=True)
    save(train(), parser.parse_args().out)


if __name__ == "__main__":
    main()
