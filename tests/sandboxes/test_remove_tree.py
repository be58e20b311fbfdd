"""`remove_tree` removes what a hostile program left, and nothing else."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from sandboxes.remove_tree import remove_tree


def nest(folder: Path, depth: int) -> None:
    """Make folders in folders. Their path is longer than the system accepts, so each is made from within its parent."""
    parent = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=parent)
        inner = os.open("d", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = inner
    os.close(parent)


def test_removes_deeply_nested_folders(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    nest(folder, 5_000)
    remove_tree(folder)
    assert not folder.exists()


def test_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").write_text("kept")
    folder = tmp_path / "left"
    (folder / "inner").mkdir(parents=True)
    for parent in (folder, folder / "inner"):
        (parent / "folder").symlink_to(outside)
        (parent / "file").symlink_to(outside / "kept")
        (parent / "loop").symlink_to(parent / "loop")
        os.link(outside / "kept", parent / "hard")
    remove_tree(folder)
    assert not folder.exists()
    assert (outside / "kept").read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o755


def test_refuses_a_link_in_place_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (tmp_path / "left").symlink_to(outside)
    with pytest.raises(OSError, match="left"):
        remove_tree(tmp_path / "left")
    assert (outside / "kept").read_text() == "kept"


def test_removes_folders_without_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    for name in ("a/b/c", "a/b", "a", "."):
        (folder / name).chmod(0)
    remove_tree(folder)
    assert not folder.exists()


def test_removes_special_files_and_strange_names(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b" "):
        os.mkdir(os.path.join(os.fsencode(folder), name))
        open(os.path.join(os.fsencode(folder), name, b"\xff"), "wb").close()
    remove_tree(folder)
    assert not folder.exists()


def test_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    remove_tree(tmp_path / "missing")


def test_removes_immutable_files_and_folders(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("run as root: nobody else can make files immutable")
    folder = tmp_path / "left"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    (folder / "file").write_text("x")
    for flag, name in (("+i", "a/b/file"), ("+a", "file"), ("+i", "a/b"), ("+a", "a"), ("+a", ".")):
        if subprocess.run(["chattr", flag, str(folder / name)], check=False).returncode:
            pytest.skip("this file system or machine has no immutable files")
    remove_tree(folder)
    assert not folder.exists()


@pytest.mark.slow
def test_removes_forty_thousand_files_in_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    for number in range(40_000):
        os.close(os.open(folder / str(number), os.O_CREAT | os.O_WRONLY))
    began = time.monotonic()
    remove_tree(folder)
    assert not folder.exists()
    assert time.monotonic() - began < 12
