"""The text of a message's content, for people."""

from __future__ import annotations

from typing import Any

import orjson


def content_text(content: Any) -> str:
    """Return one line for each content part; images and files appear as their type."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)
    return orjson.dumps(content).decode() if content else ""
