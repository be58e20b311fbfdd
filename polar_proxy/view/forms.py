"""Forms that a page sends."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import Request

from polar_proxy.errors import ApiError

LONGEST = 128 * 1024
"""Maximum size of a form in bytes. A note, the longest field, has at most 20,000 characters."""


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises ApiError 413 if the form is longer than LONGEST."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST:
            raise ApiError(f"The form has more than {LONGEST} bytes. Shorten its text.", status=413, code="invalid")
    return {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}
