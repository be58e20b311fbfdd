"""The model folder of `FakeVllm`: its byte tokenizer and its template, so that Polar can render for it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.vllm_server import END, NAMES, OFFSET

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_model_folder(folder: Path) -> Path:
    """Write tokenizer.json, the chat template and the stop token into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {name: token for token, name in enumerate(NAMES)}
    vocabulary |= {character: byte + OFFSET for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": NAMES[END], "additional_special_tokens": list(NAMES[: END + 1])}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, **special}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies, as in GPT-2's `bytes_to_unicode`."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
