"""The pictures of the documentation are small and bring nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

IMAGES = ROOT / "docs" / "images"


@pytest.mark.parametrize("name", ["demo.svg"])
def test_recordings_are_small_and_self_contained(name: str) -> None:
    """`python scripts/demo_svg.py` makes them."""
    text = (IMAGES / name).read_text()
    assert len(text) < 60_000
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert f"docs/images/{name}" in (ROOT / "README.md").read_text()
