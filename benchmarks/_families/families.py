"""The 70 chat templates of llama.cpp, and what a model's configuration adds to each: the tokens that end an answer.

The templates lie in the source package of llama-cpp-python on PyPI. They are fetched once and cached outside of the
repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
_FOLDER = "models/templates/"

# Texts in a template that a tokenizer has as one token.
CONTROL_TOKEN = re.compile(
    r"<\|[^|<>\s{}'\"]{1,40}\|>|<｜(?!tool▁)[^｜<>{}]{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]{3,25}\]|</?s>"
    r"|<(?:start|end)_of_\w+>|</?(?:assistant|user|system|tool|think)>|<SPECIAL_\d+>|</?seed:\w+>|\]~!?b\]?\[?|\[e~\["
    r"|<sep>|<(?:begin|beginning|end)_of_sentence>"
)
# Texts around reasoning, tool calls and their arguments that a tokenizer has as one token, but not as a special one.
_TAG = re.compile(r"</?(?:[a-z]+:)?[a-z_]*(?:think|tool|arg)[a-z_]*(?::[a-z]+)?>|<｜tool▁[^｜<>{}]{1,40}｜>")
_SUFFIX = re.compile(r"set HYTK = '([^']+)'")


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template with the tokens that its model's `generation_config.json` and tokenizer name."""

    name: str
    template: str
    stops: tuple[str, ...]
    """Tokens at which the model stops; the first is `eos_token`."""
    bos: str
    written: str = ""
    """Text that the template writes after an answer without calls, if it is not the first stop token."""
    options: dict[str, str] = field(default_factory=dict)
    """Options that the template requires."""

    @property
    def token_suffix(self) -> str:
        """The suffix that Hy3's template writes for `{}` in each control token and tag; empty for other templates."""
        found = _SUFFIX.search(self.template)
        return found[1] if found else ""

    @property
    def control_tokens(self) -> list[str]:
        found = dict.fromkeys([*self.stops, self.bos, *CONTROL_TOKEN.findall(self._with_suffixes())])
        return [token for token in found if token]

    @property
    def tags(self) -> list[str]:
        return [tag for tag in dict.fromkeys(_TAG.findall(self._with_suffixes())) if tag not in self.control_tokens]

    def _with_suffixes(self) -> str:
        return self.template.replace("{}", self.token_suffix) if self.token_suffix else self.template

    @property
    def whole(self) -> re.Pattern[str]:
        """Pattern that matches one control token or tag."""
        tokens = sorted([*self.control_tokens, *self.tags], key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, tokens)) + ")")


_LLAMA = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
_COHERE = ("<|END_OF_TURN_TOKEN|>",)
_CHATML = ("<|im_end|>", "<|endoftext|>")
_MISTRAL = ("</s>",)

STOPS: dict[str, tuple[str, ...]] = {
    "Apertus": ("<|assistant_end|>", "<|tools_suffix|>"),
    "Apriel-1.6": ("<|end|>",),
    "ByteDance": ("<seed:eos>",),
    "Cohere": _COHERE,
    "GLM": _GLM,
    "GigaChat": ("<|message_sep|>", "</s>"),
    "Kimi-K2": ("<|im_end|>", "[EOS]"),
    "Kimi-K3": ("<|end_of_msg|>", "[EOS]"),
    "MiniMax-M1": ("<end_of_sentence>",),
    "MiniMax": ("[e~[",),
    "Mistral": _MISTRAL,
    "NVIDIA-Nemotron-Nano": ("<SPECIAL_12>", "</s>"),
    "Reka": ("<sep>", "<|endoftext|>"),
    "Spark": _DEEPSEEK,
    "deepseek": _DEEPSEEK,
    "llama-cpp-deepseek": _DEEPSEEK,
    "fireworks": ("<|eot_id|>", "<|end_of_text|>"),
    "google-gemma-2": ("<end_of_turn>", "<eos>"),
    "google-gemma-4": ("<turn|>", "<|tool_response>", "<eos>"),
    "ibm-granite": ("<|end_of_text|>",),
    "inclusionai": ("<|role_end|>", "<|endoftext|>"),
    "llama-cpp-rwkv": ("<|rwkv_eos|>",),
    "meetkai-functionary": _LLAMA,
    "meta-llama": _LLAMA,
    "microsoft-Phi": ("<|endoftext|>", "<|end|>"),
    "mistralai": _MISTRAL,
    "moonshotai": ("<|im_end|>", "[EOS]"),
    "muse": ("<|eot|>", "<|eom|>"),
    "openai-gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "poolside": ("</assistant>", "<|endoftext|>"),
    "tencent": ("<｜hy_eos:opensource｜>",),
    "unsloth-Apriel": ("<|end|>",),
    "unsloth-mistral": _MISTRAL,
    "upstage-Solar": ("<|end|>", "<|flush|>", "<|calls|>"),
}
"""Stop tokens by the beginning of a template's name. If several fit, the longest counts; if none fits, those of
ChatML."""
_BOS = {
    "<|im_end|>": "",
    "<|eot_id|>": "<|begin_of_text|>",
    "</s>": "<s>",
    "<｜end▁of▁sentence｜>": "<｜begin▁of▁sentence｜>",
}


def load_families(folder: Path | None = None) -> list[Family]:
    """Return the templates of a folder, or those of the package."""
    folder = folder or fetch_templates()
    return [make_family(path.stem, path.read_text()) for path in sorted(folder.glob("*.jinja"))]


def make_family(name: str, template: str) -> Family:
    fits = [start for start in STOPS if name.startswith(start)]
    stops = STOPS[max(fits, key=len)] if fits else _CHATML
    options = {"functions": "[]", "datetime": "today"} if "functions" in template and "datetime" in template else {}
    return Family(
        name, template, stops, _BOS.get(stops[0], "<bos>"), "<|end|>" if "<|return|>" in stops else "", options
    )


def fetch_templates() -> Path:
    """Return the folder of the templates; download the package on the first use."""
    cache = Path(os.environ.get("POLAR_TEMPLATES_CACHE", tempfile.gettempdir())) / f"polar-templates-{VERSION}"
    if not cache.is_dir():
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*command, "--dest", scratch, f"{PACKAGE}=={VERSION}"], check=True)
            (archive,) = Path(scratch).glob("*.tar.gz")
            _extract(archive, cache)
    return cache


def _extract(archive: Path, target: Path) -> None:
    """Write the templates of a package into `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, tarfile.open(archive) as opened:
        for member in opened:
            path = Path(member.name)
            if _FOLDER in member.name and path.suffix == ".jinja" and (file := opened.extractfile(member)):
                (Path(scratch) / path.name).write_bytes(file.read())
        complete = Path(scratch)
        target.mkdir()
        for path in complete.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
