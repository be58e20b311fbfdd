"""Sandboxes with a supervisor: processes that cannot be killed, a workspace that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandboxes import process
from sandboxes.base import SandboxEnded
from sandboxes.choice import open_sandbox
from sandboxes.control_link import ControlLink
from sandboxes.orphans import describe_marked


async def test_error_names_the_processes_that_could_not_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ControlLink.call

    async def without_kill(link: ControlLink, **message: Any) -> Any:
        return {} if message["op"] == "kill" else await call(link, **message)

    monkeypatch.setattr(ControlLink, "call", without_kill)
    monkeypatch.setattr(process, "END_SECONDS", 0.2)
    sandbox = await open_sandbox("process", state_dir=tmp_path)
    with pytest.raises(SandboxEnded, match=r"could not be killed.*left: .*, \d+ sleep \(S\)\)"):
        await sandbox.exec(["sleep", "60"], timeout=0.2)
    assert describe_marked(sandbox.id) == "none"


async def test_reads_no_files_if_programs_removed_the_workspace(tmp_path: Path) -> None:
    async with await open_sandbox("process", state_dir=tmp_path) as sandbox:
        await sandbox.exec(["sh", "-c", 'rm -r "$PWD"'])
        assert (await sandbox.read_tree()).entries == {}
