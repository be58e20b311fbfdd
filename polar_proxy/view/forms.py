"""Forms that a page sends."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import Request

LONGEST = 128 * 1024
"""Bytes of a form; a note has at most 20,000 characters."""


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form. A form that is too long has none."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST:
            return {}
    return {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}
