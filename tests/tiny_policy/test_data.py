"""Training sequences: token weights, and the short form of a dialogue."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from examples.tiny_policy.data import CONTEXT_WEIGHT, Encoder, Example, Renamer, copies, dialogues
from examples.tiny_policy.evaluate import _command, wilson
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.tasks.swe_task import SYLLABLES

transformers = pytest.importorskip("transformers", reason="needs the `local` extra")


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(transformers.AutoTokenizer.from_pretrained(POLAR_TINY))


@pytest.fixture(scope="module")
def whole(encoder: Encoder) -> Example:
    return next(iter(dialogues(encoder, 1_000_000, 1)))


def text(encoder: Encoder, ids: Any) -> str:
    return str(encoder.tokenizer.decode([int(token) for token in ids]))


def test_assistant_tokens_and_their_end_of_turn_have_weight_one(encoder: Encoder, whole: Example) -> None:
    trained_text = text(encoder, whole.ids[whole.weights == 1.0])
    turns = trained_text.split("<|im_end|>")
    assert turns[-1] == ""
    assert all(turn.startswith("<think>\n") and turn.endswith("</tool_call>") for turn in turns[:-1])
    assert "tool_response" not in trained_text


def test_constant_text_has_no_weight_and_reports_a_small_one(encoder: Encoder, whole: Example) -> None:
    light = text(encoder, whole.ids[whole.weights == np.float32(CONTEXT_WEIGHT)])
    assert light.startswith("<|im_start|>user\nPlease solve this issue")
    assert "Recommended Workflow" not in light
    assert "You are a helpful assistant" not in light


def test_short_form_drops_constant_text_and_keeps_positions(encoder: Encoder, whole: Example) -> None:
    short = encoder.short(whole, random.Random(0))
    assert len(short.ids) < len(whole.ids) - 250
    assert short.weights.sum() == pytest.approx(whole.weights.sum())
    jumps = np.flatnonzero(np.diff(short.positions) != 1)
    assert len(jumps) == 1
    assert text(encoder, short.ids[jumps[0] + 1 :][:1]) == "<|im_end|>"
    assert abs(int(short.positions[-1]) - int(whole.positions[-1])) <= 300
    assert text(encoder, whole.ids).endswith(text(encoder, short.ids[jumps[0] + 1 :]))


def test_rejects_a_foreign_dialogue(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="not a dialogue of mini-swe-agent"):
        encoder.from_ids(list(range(100)))


def test_copies_weigh_only_predictable_tokens() -> None:
    alphabet = np.arange(100, 150)
    for made in copies(np.random.default_rng(0), 20, alphabet, 96):
        assert len(made.ids) == 96
        assert set(made.ids) <= set(alphabet)
        known = np.flatnonzero(made.weights)
        assert len(known) > 20
        pairs = {tuple(made.ids[i : i + 3]) for i in range(94)}
        for index in known:
            before = [tuple(made.ids[i : i + 3]) for i in range(index - 2)]
            assert tuple(made.ids[index - 2 : index + 1]) in before
        assert pairs


def test_wilson_interval() -> None:
    # Newcombe 1998, table I: 81 of 263.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 10)[0] == pytest.approx(0.0)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "ls"),
        ('<think>\nx\n</think>\n\n<tool_call>{"name": "bash", "arguments": {"command": ""}}', ""),
        ('<tool_call>\n{"name": "sh", "arguments": {"command": "ls"}}\n</tool_call>', None),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": 1}}\n</tool_call>', None),
        ('<tool_call>\n{"name": "bash", "arguments": "ls"\n</tool_call>', None),
        ("just text", None),
    ],
)
def test_command_of_an_answer(answer: str, command: str | None) -> None:
    assert _command(answer)[0] == command


def test_renaming_replaces_names_and_numbers_consistently(encoder: Encoder, whole: Example) -> None:
    other = Renamer(encoder, random.Random(1))(whole)
    pairs = {(int(a), int(b)) for a, b in zip(whole.ids, other.ids, strict=True) if a != b}
    assert len(pairs) > 5
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
    words = set(encoder.tokenizer.convert_ids_to_tokens([a for a, _ in pairs]))
    assert words <= {*SYLLABLES, *map(str, range(11, 100))}
    start, (first, last) = encoder.task_start(whole.ids), encoder.constant(whole.ids)
    assert (other.ids[:start] == whole.ids[:start]).all()
    assert (other.ids[first:last] == whole.ids[first:last]).all()


def test_padding_varies_only_after_the_constant_text(encoder: Encoder, whole: Example) -> None:
    first_moved = encoder.constant(whole.ids)[1]
    rng = random.Random(1)
    moves = set()
    for _ in range(20):
        moved = encoder.shifted(whole, rng).positions - whole.positions
        assert (moved[:first_moved] == 0).all()
        assert len(set(moved[first_moved:].tolist())) == 1
        moves.add(int(moved[-1]))
    assert len(moves) > 10
