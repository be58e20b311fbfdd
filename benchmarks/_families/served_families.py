"""The model families that are run on a real vLLM, with the parsers that `vllm serve` needs for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks._families.random_models import Architecture
from polar_proxy.types import Json


@dataclass(frozen=True, slots=True)
class ServedFamily:
    name: str
    template: str
    """Name of its template in the package (`families.py`)."""
    tool_parser: str
    reasoning_parser: str = ""
    options: Mapping[str, Json | bool] = field(default_factory=dict)
    """Template options of every request."""
    left_out: str = ""
    """Pattern of text that the template writes in an answer and that the grammar of the server's parser forbids."""
    always_reasons: bool = False
    """True if the server's parser expects every answer to begin with reasoning, as the real model's answers do."""
    architecture: Architecture = "qwen3"
    """Architecture of the small model. vLLM has its own rendering or parsing for some architectures."""
    names_parsers: bool = False
    """Whether Polar's setting `engine.vllm_parsers` names the server's parsers."""
    more_flags: tuple[str, ...] = ()
    """Further flags of `vllm serve`."""
    note: str = ""
    """What differs from other families in its sessions, and why."""

    @property
    def harmony(self) -> bool:
        """Return whether the server renders and parses with the library openai-harmony."""
        return self.architecture == "gpt_oss"

    @property
    def flags(self) -> list[str]:
        reasoning = ["--reasoning-parser", self.reasoning_parser] if self.reasoning_parser else []
        return ["--tool-call-parser", self.tool_parser, *reasoning, *self.more_flags]

    @property
    def parsers(self) -> str:
        return f"{self.tool_parser} / {self.reasoning_parser or '-'}"


SERVED = (
    ServedFamily("Qwen3", "Qwen-Qwen3-0.6B", "hermes", "qwen3"),
    ServedFamily("Qwen3.5", "Qwen3.5-4B", "qwen3_coder", "qwen3"),
    ServedFamily("Qwen3-Coder", "Qwen3-Coder", "qwen3_coder"),
    ServedFamily("Kimi-K2", "moonshotai-Kimi-K2", "kimi_k2"),
    ServedFamily("MiniMax-M2", "MiniMax-M2", "minimax_m2", "minimax_m2"),
    ServedFamily("Nemotron-3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder", "nemotron_v3"),
    ServedFamily("Ministral-3", "mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "mistral"),
    ServedFamily(
        "Seed-OSS",
        "ByteDance-Seed-OSS",
        "seed_oss",
        "seed_oss",
        always_reasons=True,
        note="Every planned answer reasons, because vLLM's parser takes an answer without reasoning for reasoning.",
    ),
    ServedFamily("Granite-4", "ibm-granite-granite-4.0", "granite4"),
    ServedFamily("DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.1", "deepseek_v31", "deepseek_v3"),
    ServedFamily(
        "Gemma-4",
        "google-gemma-4-31B-it",
        "gemma4",
        "gemma4",
        {"enable_thinking": True},
        note="vLLM's parser gives numbers in nested arguments as text.",
    ),
    ServedFamily(
        "GLM-4.6",
        "GLM-4.6",
        "glm45",
        "glm45",
        left_out=r"\n(?=<arg_key>|<arg_value>|</tool_call>)",
        note="The grammar of vLLM's parser forbids the line breaks that the template writes between arguments. The "
        "planned answers leave them out.",
    ),
    ServedFamily("GLM-4.7", "GLM-4.7-Flash", "glm47", "glm47"),
    ServedFamily("Llama-3.1", "meta-llama-Llama-3.1-8B-Instruct", "llama3_json"),
    ServedFamily(
        "Mistral-Small",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistral",
        note="The template moves the list of tools to the last message of the user, so the history of a turn after a "
        "new user message is another one (`history_changed`). vLLM's parser takes the call id that the template writes "
        "after the name (`[CALL_ID]`) as a part of the tool's name.",
    ),
    ServedFamily(
        "Kimi-K3",
        "Kimi-K3",
        "kimi_k3",
        "kimi_k3",
        names_parsers=True,
        note="Its reasoning ends with several tokens, so the server cannot be made to end it, and nothing shows which "
        'parsers it uses. They are named: `engine.vllm_parsers = "kimi_k3/kimi_k3"`.',
    ),
    ServedFamily("Hy3", "tencent-Hy3", "hy_v3", "hy_v3"),
    ServedFamily(
        "Cohere",
        "Cohere2MoE",
        "cohere_command4",
        "cohere_command4",
        architecture="cohere2",
        names_parsers=True,
        note="vLLM's parser replaces every grammar of a request with tools by its own, so the server cannot be made to "
        "give a prescribed answer, and its parsers are named (`engine.vllm_parsers`). It gives a call without "
        "arguments as empty text. It needs the package `cohere-melody` beside vLLM.",
    ),
    ServedFamily(
        "gpt-oss",
        "openai-gpt-oss-120b",
        "openai",
        "openai_gptoss",
        architecture="gpt_oss",
        note="vLLM renders chats with the library openai-harmony, but `/tokenize` with the template. Polar lets vLLM's "
        "own renderer in a side process render. With other random weights this model reasoned before the prescribed "
        "text, and Polar could not find out the parsers.",
    ),
)

STRICT_LEVEL = tuple(
    replace(served, name=f"{served.name}, strict level", more_flags=("--tool-strict-level", "function"))
    for served in SERVED
    if served.name in ("Qwen3", "Qwen3.5")
)
"""Servers that sample all requests with tools under a grammar, for measurements of grammars."""
