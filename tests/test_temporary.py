"""`temporary_folder` removes whatever was left in it."""

from __future__ import annotations

from pathlib import Path

from polar_proxy.temporary import temporary_folder


def test_removes_deeply_nested_folders(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder:
        inner = str(folder)
        for _ in range(1400):
            inner += "/d"
            Path(inner).mkdir()
    assert list(tmp_path.iterdir()) == []


def test_removes_its_folder_after_an_error(tmp_path: Path) -> None:
    try:
        with temporary_folder(tmp_path) as folder:
            (folder / "file").write_text("x")
            raise ValueError
    except ValueError:
        pass
    assert list(tmp_path.iterdir()) == []
