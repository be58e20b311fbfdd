"""`polar key`, and what `polar serve` makes of keys; and that commands start fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from typer.testing import CliRunner

from polar_proxy.cli.app import app
from polar_proxy.errors import UsageError
from tests.cli.test_serve import serving  # noqa: F401 (a fixture)


def polar(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return orjson.loads(done.stdout)


def test_new_list_revoke(polar_home: Path) -> None:
    made = polar("key", "new", "--role", "trainer", "--label", "gpu box")
    assert made["key"].startswith("polar-trainer-")
    (row,) = polar("key", "list")["keys"]
    assert (row["name"], row["role"], row["label"], row["revoked_at"]) == (made["name"], "trainer", "gpu box", None)
    assert made["key"] not in str(polar("key", "list"))
    assert polar("key", "revoke", made["name"])["revoked_at"] is not None
    with pytest.raises(UsageError, match="admin or trainer"):
        polar("key", "new", "--role", "boss")
    with pytest.raises(UsageError, match="no API key"):
        polar("key", "revoke", "abcdef123456")
    for file in polar_home.rglob("*"):
        if file.is_file():
            assert made["key"].encode() not in file.read_bytes(), file


def test_the_server_lets_its_own_user_in(
    serving: tuple[subprocess.Popen[str], dict[str, Any]],  # noqa: F811
    polar_home: Path,
) -> None:
    _, ready = serving
    file = Path(ready["api_key_file"])
    assert file == polar_home / "api-key"
    assert file.stat().st_mode & 0o777 == 0o600
    url = f"{ready['url']}/api/v1"
    assert httpx.get(f"{url}/service", trust_env=False, timeout=60).status_code == 401
    headers = {"authorization": f"Bearer {file.read_text().strip()}"}
    told = httpx.get(f"{url}/service", headers=headers, trust_env=False, timeout=60).json()
    assert (told["engine"]["model"], told["state"]) == ("scripted-model", None)
    trainer = {"authorization": f"Bearer {polar('key', 'new', '--role', 'trainer')['key']}"}
    assert (
        httpx.get(f"{url}/feed", headers=trainer, trust_env=False, timeout=60).status_code == 200
    )  # at once, without a restart
    assert httpx.post(f"{url}/sessions", json={}, headers=trainer, trust_env=False, timeout=60).status_code == 403


@pytest.mark.parametrize("module", ["fastapi", "torch", "httpx"])
def test_help_loads_nothing_heavy(module: str) -> None:
    code = (
        "import sys; sys.argv = ['polar', '--help']\n"
        "from polar_proxy.cli.app import app\n"
        "try: app()\n"
        f"except SystemExit: sys.exit({module!r} in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
