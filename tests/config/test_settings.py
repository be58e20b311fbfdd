"""The order of the sources of settings, and what is reported about invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from polar_proxy.cli.common import load_settings
from polar_proxy.config import GatewaySettings, Settings
from polar_proxy.errors import UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory; the Polar home is the folder `home` beside it."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("POLAR_DB", raising=False)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def _home(here: Path) -> Path:
    return here.parent / "home" / "polar.toml"


def test_defaults(here: Path) -> None:
    settings = Settings()
    assert settings.home == here.parent / "home"
    assert settings.harness_cache == here.parent / "home" / "harnesses"
    assert (settings.gateway.host, settings.gateway.port, settings.gateway.require_known_keys) == (
        "127.0.0.1",
        8399,
        False,
    )
    assert settings.engine.kind == "local"


def test_later_sources_win_setting_by_setting(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _home(here).write_text('db = "home.db"\n[gateway]\nhost = "h1"\nport = 1\nmax_body_mb = 1\nheartbeat_seconds = 1\n')
    (here / "polar.toml").write_text("[gateway]\nport = 2\nmax_body_mb = 2\nheartbeat_seconds = 2\n")
    monkeypatch.setenv("POLAR_GATEWAY__MAX_BODY_MB", "3")
    monkeypatch.setenv("POLAR_GATEWAY__HEARTBEAT_SECONDS", "3")
    settings = load_settings(gateway={"heartbeat_seconds": 4.0, "host": None})
    gateway = settings.gateway
    assert (gateway.host, gateway.port, gateway.max_body_mb, gateway.heartbeat_seconds) == ("h1", 2, 3, 4.0)
    assert settings.db == "home.db"
    assert load_settings("flag.db").db == "flag.db"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[gatway]\nport = 1\n", "gatway"),
        ("[gateway]\nprot = 1\n", r"gateway\.prot"),
        ("[gateway]\nport = 70000\n", r"gateway\.port"),
        ("[gateway\n", r"polar\.toml"),
    ],
)
def test_names_invalid_settings(here: Path, toml: str, message: str) -> None:
    (here / "polar.toml").write_text(toml)
    with pytest.raises(UsageError, match=message):
        load_settings()


def test_rejects_a_section_in_the_environment_that_is_not_json(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_GATEWAY", "x")
    with pytest.raises(UsageError, match="gateway"):
        load_settings()


def test_secrets_are_not_printed(here: Path) -> None:
    (here / "polar.toml").write_text('[engine]\napi_key = "sk-secret"\n')
    assert "sk-secret" not in repr(Settings())
    (here / "polar.toml").write_text('[engine]\napi_key = ["sk-secret"]\n')
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert "sk-secret" not in str(caught.value)


def test_refuses_unknown_prompt_modes() -> None:
    with pytest.raises(ValidationError, match="prompt_mode"):
        GatewaySettings.model_validate({"prompt_mode": "observe"})
