"""Converts dialogues into training sequences.

A sequence is the dialogue as the chat template renders it, with a weight per token: 1 on what the assistant
wrote (its end of turn included), `CONTEXT_WEIGHT` on the rest of the dialogue, 0 on the prompt's constant
text. The short form leaves that constant text out and keeps every other token at its true position, so that
attention learns the real distances at a lower price. The partial form keeps a random stretch of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.tiny_policy.dialogues import TOOLS, Message, play_expert, some_system
from polar_proxy.tasks import get_source
from polar_proxy.tasks.swe_task import SYLLABLES

CONTEXT_WEIGHT = 0.1
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Example:
    """One dialogue: `ids`, `positions` int64 [n] and `weights` float32 [n] (the weight of predicting ids[i])."""

    ids: IntArray
    positions: IntArray
    weights: FloatArray


class Encoder:
    """Renders and encodes dialogues with polar-tiny's tokenizer (a Transformers tokenizer)."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._answer = self._encode("<|im_start|>assistant\n")
        self._task = self._encode("<|im_start|>user\nPlease solve this issue:")
        self._task_end = self._encode(
            "You can execute bash commands and edit files to implement the necessary changes."
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def full(self, messages: Sequence[Message]) -> Example:
        """Return the whole dialogue, as it is sampled."""
        text = self.tokenizer.apply_chat_template(list(messages), tools=TOOLS, tokenize=False)
        return self.from_ids(self._encode(text))

    def from_ids(self, token_ids: Sequence[int]) -> Example:
        """Return the example of a recorded trace, given the ids of the whole dialogue."""
        ids = np.asarray(token_ids, dtype=np.int64)
        weights = np.full(len(ids), CONTEXT_WEIGHT, dtype=np.float32)
        first, last = self.constant(ids)
        weights[: self.task_start(ids)] = 0.0
        weights[first:last] = 0.0
        answering = False
        for index, token in enumerate(ids):
            if answering:
                weights[index] = 1.0
                answering = token != self.end
            elif token == self._answer[-1] and list(ids[index - 2 : index + 1]) == self._answer:
                answering = True
        return Example(ids, np.arange(len(ids)), weights)

    def task_start(self, ids: IntArray) -> int:
        """Return the index of the token `<|im_start|>` that opens the user's message."""
        return _find(ids, self._task, 0)

    def constant(self, ids: IntArray) -> tuple[int, int]:
        """Return [first, last) of the constant text after the bug report, up to the end of the user's message."""
        first = _find(ids, self._task_end, self.task_start(ids))
        return first, first + int(np.argmax(ids[first:] == self.end))

    def shifted(self, whole: Example, rng: random.Random) -> Example:
        """Return the dialogue with the positions after the constant text shifted by a random distance.

        The constant text has a line about the machine (`uname`), whose length differs between machines. With a fixed
        distance, the policy would learn to find the text to copy by its distance.
        """
        positions = whole.positions.copy()
        positions[self.constant(whole.ids)[1] :] += rng.randrange(-30, 60)
        return Example(whole.ids, positions, whole.weights)

    def short(self, whole: Example, rng: random.Random) -> Example:
        """Return the short form of a dialogue. Distances across the left-out text vary a little, as in real prompts."""
        start = self.task_start(whole.ids)
        first, last = self.constant(whole.ids)
        keep = np.concatenate([np.arange(start, first), np.arange(last, len(whole.ids))])
        positions = whole.positions[keep].copy()
        positions[first - start :] += rng.randrange(-100, 300)
        return Example(whole.ids[keep], positions, whole.weights[keep])

    def partial(self, whole: Example, rng: random.Random) -> Example:
        """Return a form between short and full: it keeps a random part of the constant text, which attention must learn
        to skip."""
        start = self.task_start(whole.ids)
        first, last = self.constant(whole.ids)
        size = int((last - first) * rng.uniform(0.1, 0.6))
        left = rng.randrange(first, last - size + 1)
        parts = [np.arange(start, first), np.arange(left, left + size), np.arange(last, len(whole.ids))]
        if rng.random() < 0.3:
            parts.insert(0, np.arange(start))
        keep = np.concatenate(parts)
        return Example(whole.ids[keep], whole.positions[keep], whole.weights[keep])


class Renamer:
    """Replaces the names and numbers of a dialogue consistently.

    The policy only has to copy names and two-digit numbers, so a dialogue stays correct when all of them are exchanged
    consistently. A few hundred recordings thus represent any number of instances. A name is a run of two or more
    syllable tokens; the constant part of the prompt is not changed.
    """

    def __init__(self, encoder: Encoder, rng: random.Random) -> None:
        to_ids = encoder.tokenizer.convert_tokens_to_ids
        self._encoder = encoder
        self._rng = rng
        self._syllables = np.array(to_ids(list(SYLLABLES)))
        self._numbers = np.array(to_ids([str(number) for number in range(11, 100)]))
        self._size = len(encoder.tokenizer)

    def __call__(self, example: Example) -> Example:
        other = np.arange(self._size)
        other[self._syllables] = self._rng.sample(self._syllables.tolist(), len(self._syllables))
        syllable = np.isin(example.ids, self._syllables)
        name = syllable & (np.roll(syllable, 1) | np.roll(syllable, -1))
        other[self._numbers] = self._rng.sample(self._numbers.tolist(), len(self._numbers))
        change = name | np.isin(example.ids, self._numbers)
        first, last = self._encoder.constant(example.ids)
        change[: self._encoder.task_start(example.ids)] = False
        change[first:last] = False
        ids = np.where(change, other[example.ids], example.ids)
        return Example(ids, example.positions, example.weights)


def _find(ids: IntArray, pattern: Sequence[int], start: int) -> int:
    """Return the index of the first occurrence of `pattern` in `ids` from `start` on. Raises ValueError if it is
    absent."""
    windows = np.lib.stride_tricks.sliding_window_view(ids[start:], len(pattern))
    hits = np.flatnonzero((windows == np.asarray(pattern)).all(axis=1))
    if len(hits) == 0:
        raise ValueError("this is not a dialogue of mini-swe-agent with the prompt that polar-tiny was trained on")
    return start + int(hits[0])


def dialogues(encoder: Encoder, first_seed: int, count: int) -> Iterator[Example]:
    """Return the expert's dialogues with tasks `first_seed`, ..., in full form, played offline."""
    source = get_source("swe-task")
    for seed in range(first_seed, first_seed + count):
        rng = random.Random(f"dialogue/1/{seed}")
        yield encoder.full(play_expert(source.task(seed), some_system(rng), rng))


def copies(rng: np.random.Generator, count: int, alphabet: IntArray, length: int = 128) -> list[Example]:
    """Return sequences over a small alphabet with repeated stretches, which teach copying.

    Only predictable tokens have a weight: those of a repeated stretch from the third on, because two tokens may also
    occur elsewhere.
    """
    made = []
    for _ in range(count):
        ids = rng.choice(alphabet, length)
        weights = np.zeros(length, dtype=np.float32)
        filled = length // 3
        while filled < length:
            size = min(int(rng.integers(4, 14)), length - filled)
            start = int(rng.integers(0, filled - size))
            ids[filled : filled + size] = ids[start : start + size]
            weights[filled + 2 : filled + size] = 1.0
            filled += size
        made.append(Example(ids, np.arange(length) + int(rng.integers(0, 2000)), weights))
    return made
