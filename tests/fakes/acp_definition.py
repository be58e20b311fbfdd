"""The definition of the small ACP agent, as a user would add it with `polar harness add`."""

from __future__ import annotations

import sys
from pathlib import Path

AGENT = Path(__file__).with_name("acp_agent.py")


def write_definition(folder: Path, name: str = "small-acp") -> Path:
    """Write the definition file into `folder` and return its path."""
    text = f"""
name = "{name}"
summary = "A small agent for tests"
program = "acp_agent.py"
wire_api = "openai_chat"

[install]
path = "{AGENT}"

[connection.env]
OPENAI_BASE_URL = "{{base_url}}"
OPENAI_API_KEY = "{{api_key}}"
OPENAI_MODEL = "{{model}}"

[acp]
command = ["{sys.executable}", "{{program}}"]
"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path
