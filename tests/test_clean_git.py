"""`run_clean_git` reads no more of git's output than it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_proxy.clean_git import CleanGitError, GitOutputTooLargeError, run_clean_git


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository.git"
    run_clean_git("init", "-q", "--bare", "--template=", str(folder))
    return folder


def test_refuses_output_above_the_limit(repository: Path) -> None:
    data = b"x" * 1_000_000
    blob = run_clean_git("hash-object", "-w", "--stdin", repository=repository, stdin=data).decode().strip()
    arguments = ("cat-file", "blob", blob)
    assert run_clean_git(*arguments, repository=repository, output_limit=len(data)) == data
    with pytest.raises(GitOutputTooLargeError, match="cat-file printed more than 999999 bytes"):
        run_clean_git(*arguments, repository=repository, output_limit=len(data) - 1)


def test_ends_git_that_prints_more_than_the_limit_before_it_read_its_input(repository: Path) -> None:
    lines = b"0123456789abcdef\n" * 20_000  # more than the pipes to and from git hold
    with pytest.raises(GitOutputTooLargeError):
        run_clean_git("cat-file", "--batch-check", repository=repository, stdin=lines, output_limit=1000)
    assert len(run_clean_git("cat-file", "--batch-check", repository=repository, stdin=lines)) > len(lines)


def test_reports_the_error_of_git(repository: Path) -> None:
    with pytest.raises(CleanGitError, match="Not a valid object name"):
        run_clean_git("cat-file", "blob", "missing", repository=repository)


def test_git_may_end_without_reading_its_input(repository: Path) -> None:
    assert b"git version" in run_clean_git("version", repository=repository, stdin=b"x" * 1_000_000)
