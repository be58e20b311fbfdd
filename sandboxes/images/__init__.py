"""The default image of docker sandboxes: its recipe, and a tag that is a hash of the recipe."""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).parent
DOCKERFILE = HERE / "Dockerfile"
PACKAGES = HERE / "packages.txt"


def packages() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in PACKAGES.read_text().splitlines())
    return [line for line in lines if line]


def tag() -> str:
    """Return the tag of the default image. The tag contains a hash of the recipe from which the image is built."""
    recipe = DOCKERFILE.read_bytes() + b"\0" + PACKAGES.read_bytes()
    return f"polar-sandbox:{hashlib.sha256(recipe).hexdigest()[:12]}"
