#!/usr/bin/env python3
"""Write a small Qwen3 model with a byte-level tokenizer as a GGUF file, for tests with a real llama-server.

    scripts/gguf_model.py MODEL_FOLDER FILE.gguf

llama.cpp's own converter recognises tokenizers by a hash, and refuses those of test models. Weights are float32.
llama.cpp splits text into words by one of its own named patterns, so this program replaces a model's pattern by the
name of one that gives the same ids. Needs the packages gguf, numpy and safetensors (`scripts/llama_server.sh install`
has them).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
from safetensors.numpy import load_file

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_ESCAPE = "\\"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_POLAR_TINY = r"""\\u[0-9a-fA-F]{4}|\\[ntr"\\]|\p{L}+|\p{N}{1,3}|\\|[^\p{L}\p{N}\\]+"""
"""The pattern of polar-tiny, which llama.cpp lacks. But no merge of polar-tiny crosses the border of two words, so a
pattern that only splits around numbers gives the same ids if escapes are merged first: `\\n` before a letter is then
no part of a word. Only numbers of more than three digits and rare escapes (`\\u00e9` before a letter, two backslashes)
may get other ids."""


def write_gguf(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_name(folder.resolve().name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    add_tokenizer(writer, folder, config["vocab_size"])
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        writer.add_tensor(gguf_name(name), tensor.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = folder / "chat_template.jinja"
    tokens = [f"[unused{place}]" for place in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for text, token in described["model"]["vocab"].items():
        tokens[token], types[token] = text, gguf.TokenType.NORMAL
    for added in described["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    name, merges = words_and_merges(described)
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokens.index(config["eos_token"]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template.read_text() if template.is_file() else config["chat_template"])


def words_and_merges(described: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """Return llama.cpp's name of the pattern that cuts text into words, and the merges in the order of their use."""
    pattern = described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    merges = described["model"]["merges"]
    if pattern == _QWEN:
        return "qwen2", merges
    if pattern == _POLAR_TINY:
        return "superbpe", sorted(merges, key=lambda pair: pair[0] != _ESCAPE)
    sys.exit(f"No pattern of llama.cpp is known to give the ids of this tokenizer: {pattern}")


def gguf_name(name: str) -> str:
    parent, kind = name.rsplit(".", 1)
    if parent in _OTHER_NAMES:
        return f"{_OTHER_NAMES[parent]}.{kind}"
    _, _, layer, part = parent.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
