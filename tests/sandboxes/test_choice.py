"""Which kinds are available, and which one `auto` chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxes import images
from sandboxes.base import SandboxSpec, SandboxUnavailable
from sandboxes.choice import available, choose, open_sandbox


def test_available_lists_every_kind_with_reason_and_remedy() -> None:
    found = available()
    assert [a.kind for a in found] == ["docker", "bubblewrap", "process"]
    assert found[-1].ok
    for a in found:
        assert a.ok or (a.why_not and a.how_to_get)


async def test_available_works_within_an_event_loop() -> None:
    assert len(available()) == 3


def test_auto_chooses_the_strongest_with_the_reason() -> None:
    found = {a.kind: a for a in available()}
    strongest = next(kind for kind, a in found.items() if a.ok)
    choice = choose()
    assert choice.kind == strongest
    assert strongest in choice.reason
    for kind, a in found.items():
        if not a.ok:
            assert f"no {kind}: {a.why_not}" in choice.reason


async def test_auto_opens_a_sandbox(tmp_path: Path) -> None:
    async with await open_sandbox(state_dir=tmp_path) as sandbox:
        assert sandbox.kind == choose().kind


def test_process_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    choice = choose()
    assert choice.kind == "process"
    assert "bwrap is not installed" in choice.reason
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        choose("bubblewrap")


async def test_missing_explicit_kind_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    for kind in ("bubblewrap", "docker"):
        with pytest.raises(SandboxUnavailable):
            await open_sandbox(kind, SandboxSpec(), state_dir=tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("records/*"))


def test_image_tag_changes_with_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = images.tag()
    changed = tmp_path / "packages.txt"
    changed.write_text(images.PACKAGES.read_text() + "vim\n")
    monkeypatch.setattr(images, "PACKAGES", changed)
    assert images.tag() != before
    assert {"python3", "git", "ca-certificates", "libssl3", "vim"} <= set(images.packages())
