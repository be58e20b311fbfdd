"""The `vllm serve` command for a model is found from its chat template, with vLLM's own parsers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.vllm.serve_command import ServeCommand, find_serve_command
from polar_proxy.errors import UsageError
from tests.engines.vllm_environment import vllm_python

XML_CALLS = """\
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def model_with(template: str, folder: Path) -> str:
    """Return a copy of the bundled policy with another chat template."""
    shutil.copytree(POLAR_TINY, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_finds_the_parsers_of_the_bundled_policy() -> None:
    found = await find_serve_command(str(POLAR_TINY), vllm_python())
    assert found.parsers[0] == ("qwen3_json", "qwen3")
    assert found.line == (
        f"vllm serve {POLAR_TINY} --enable-auto-tool-choice --tool-call-parser qwen3_json --reasoning-parser qwen3"
    )


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_finds_the_parsers_of_another_form(tmp_path: Path) -> None:
    found = await find_serve_command(model_with(XML_CALLS, tmp_path / "model"), vllm_python())
    assert found.parsers[0] == ("qwen3_xml", "qwen3")


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_template_without_calls_needs_no_tool_parser(tmp_path: Path) -> None:
    plain = XML_CALLS[: XML_CALLS.index("{%- for call")] + XML_CALLS[XML_CALLS.index("<|im_end|>") :]
    found = await find_serve_command(model_with(plain, tmp_path / "model"), vllm_python())
    assert {tool for tool, _ in found.parsers} == {None}


async def test_the_models_files_are_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"chat template and tokenizer\.json of .* cannot be read"):
        await find_serve_command(str(tmp_path))


def test_names_with_spaces_are_quoted() -> None:
    assert ServeCommand("my model", "0.32.0", ((None, None),)).line == "vllm serve 'my model'"
