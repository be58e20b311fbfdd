"""Where `polar export` writes: a file appears whole or not at all, and what is no plain file is never replaced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from polar_proxy.cli.export import _open_output
from polar_proxy.errors import UsageError


def _write(file: str, *lines: bytes, fail: bool = False) -> None:
    with _open_output(file) as target:
        for line in lines:
            target.write(line)
        if fail:
            raise RuntimeError("in the middle")


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old")
    with _open_output(str(path)) as target:
        target.write(b"new")
        target.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_failure_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError):
        _write(str(path), b"half", fail=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_bytes(b"old")
    link.symlink_to(real)
    _write(str(link), b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As is /dev/null, which root would lose otherwise."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reader.start()
    _write(str(pipe), b"a", b"b")
    reader.join(10)
    assert heard == [b"ab"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("file", ["", ".", "{tmp}", "{tmp}/missing/out.jsonl"])
def test_what_is_no_file_name_is_told(tmp_path: Path, file: str) -> None:
    with pytest.raises(UsageError, match="Cannot write"):
        _write(file.format(tmp=tmp_path), b"x")
