"""The end of mitmproxy, with a program in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_adapters.base import Installation
from polar_proxy.intercept import proxy
from polar_proxy.intercept.certificates import CertificateAuthority
from polar_proxy.intercept.proxy import ProxySettings, run_proxy
from polar_proxy.types import Json

STUBBORN = """#!/bin/sh
trap '' TERM
echo '{"event": "listening", "port": 1}'
echo '{"event": "untrusted", "host": "api.openai.com", "reason": "does not trust"}'
while :; do sleep 0.1; done
"""


def test_a_proxy_that_does_not_end_is_killed_and_its_events_are_kept(
    tmp_path: Path, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mitmproxy takes long to end while it has hundreds of connections on a busy machine."""
    monkeypatch.setattr(proxy, "_STOP_SECONDS", 0.5)
    program = tmp_path / "bin" / "mitmdump"
    program.parent.mkdir()
    program.write_text(STUBBORN)
    program.chmod(0o755)
    events: list[Json] = []
    settings = ProxySettings("http://127.0.0.1:1", "my-run")
    with run_proxy(Installation("mitmproxy", "12.2", tmp_path, program), authority, settings, events.append) as port:
        assert port == 1
    assert [event["event"] for event in events] == ["untrusted"]
