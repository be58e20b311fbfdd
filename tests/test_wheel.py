"""The wheel has every file of the packages, and the web page works from it without the source tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("polar_proxy", "harness_adapters", "sandboxes")
OPEN_PAGES = """
import asyncio, sys, httpx, polar_proxy
from pathlib import Path
from polar_proxy.config import Settings
from polar_proxy.store import open_store
from polar_proxy.view.server import create_pages

async def main():
    assert Path(polar_proxy.__file__).is_relative_to(sys.argv[1]), polar_proxy.__file__
    async with open_store(f"sqlite:///{sys.argv[1]}/polar.db") as store:
        transport = httpx.ASGITransport(create_pages(store, Settings(home=Path(sys.argv[1]))))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for path in ("/", "/view/compare", "/view/assets/polar.css", "/view/assets/tokens.js"):
                assert (await client.get(path)).status_code == 200, path

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="pip install hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    assert {name for name in tracked if name and (ROOT / name).exists()} - packed == set()
    assert {name for name in packed if name.startswith("polar_proxy/view/") and name.endswith((".html", ".js", ".css"))}
    command = [sys.executable, "-c", OPEN_PAGES, str(tmp_path / "installed")]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path / "installed")}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
