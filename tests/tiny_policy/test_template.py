"""polar-tiny's chat template and tokenizer: a later prompt begins with the earlier prompt and its sampled answer."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from examples.tiny_policy.dialogues import TOOLS, opening, play_expert
from examples.tiny_policy.expert import next_action
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.tasks import get_source
from polar_proxy.tasks.swe_task import SYLLABLES

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="needs the `local` extra")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(POLAR_TINY)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def render(tokenizer: Any, messages: list[dict[str, Any]], *, prompt: bool, tools: Any = TOOLS) -> str:
    text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    return text


@pytest.mark.parametrize("seed", range(5))
def test_prompt_begins_with_the_last_prompt_and_the_sampled_answer(tokenizer: Any, seed: int) -> None:
    messages = play_expert(get_source("swe-task").task(seed), "Linux 6.1 x86_64", random.Random(0))
    asked = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(asked) >= 4
    for now, later in pairwise(asked):
        prompt = encode(tokenizer, render(tokenizer, messages[:now], prompt=True))
        answer = encode(tokenizer, next_action(messages[:now]).answer() + "<|im_end|>")
        following = encode(tokenizer, render(tokenizer, messages[:later], prompt=True))
        assert following[: len(prompt) + len(answer)] == prompt + answer


def test_tokenizer_loses_no_character(tokenizer: Any) -> None:
    text = "naïve\tπ 漢字 🙂\r\n\\n \\u003c <think>x</think> don't `f(x)`  \x00"
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_name_is_tokenized_as_its_syllables_everywhere(tokenizer: Any) -> None:
    rng, whole = random.Random(1), 0
    for _ in range(200):
        parts = [rng.choice(SYLLABLES) for _ in range(3)]
        name = "".join(parts)
        alone = encode(tokenizer, name)
        whole += alone == tokenizer.convert_tokens_to_ids(parts)
        for left, right in ((" ", "("), ("`", "`"), ("/", ".py"), ("\\n", ":"), ("'def ", "'"), ("_", "\\n")):
            ids = encode(tokenizer, left + name + right)
            assert any(ids[start : start + len(alone)] == alone for start in range(len(ids)))
    assert whole >= 190


def test_arguments_render_the_same_as_text_and_as_object(tokenizer: Any) -> None:
    arguments = {"command": "echo \"ä\" 'b' <c> \\d\n"}

    def message(value: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "id": "c", "function": {"name": "bash", "arguments": value}}
        return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]

    as_text = render(tokenizer, message(json.dumps(arguments, ensure_ascii=False)), prompt=False)
    assert as_text == render(tokenizer, message(arguments), prompt=False)
    assert '{"name": "bash", "arguments": {"command": "echo \\"ä\\"' in as_text


def test_renders_content_reasoning_and_parallel_calls_like_qwen3(tokenizer: Any) -> None:
    calls = [{"function": {"name": "a", "arguments": "{}"}}, {"function": {"name": "b", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Text.", "reasoning_content": "Why.", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Bye."},
    ]
    assert render(tokenizer, messages, prompt=False, tools=None) == (
        "<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nWhy.\n</think>\n\nText.\n"
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nBye.<|im_end|>\n"
    )


def test_tags_are_single_tokens(tokenizer: Any) -> None:
    for mark in ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert len(encode(tokenizer, mark)) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_bundled_tokenizer_is_the_scripts_output(tokenizer: Any) -> None:
    from examples.tiny_policy.tokenizer import train

    made = json.loads(train().to_str())
    shipped = json.loads((POLAR_TINY / "tokenizer.json").read_text())
    assert made["model"] == shipped["model"]
    assert made["added_tokens"] == shipped["added_tokens"]
    prompt = render(tokenizer, opening("x", "y"), prompt=True)
    assert train().encode(prompt, add_special_tokens=False).ids == encode(tokenizer, prompt)
