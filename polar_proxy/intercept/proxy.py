"""mitmproxy as a child process: installed in its own environment, and run with Polar's addon.

mitmproxy 12 needs Python 3.12, and every version of mitmproxy pins package versions that conflict with Polar's
dependencies. So mitmproxy is installed like a Python harness (`harness_adapters.toolkit`), in the folder of the
harnesses.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import IO, Literal

from harness_adapters.base import Installation
from harness_adapters.toolkit.python_venv import VenvPackage
from polar_proxy.config import child_environment
from polar_proxy.errors import PolarError
from polar_proxy.intercept.certificates import CertificateAuthority
from polar_proxy.intercept.hosts import INTERCEPT_PREFIX, rules_for_proxy
from polar_proxy.temporary import temporary_folder
from polar_proxy.types import Json

Others = Literal["pass", "refuse", "list"]
"""How to treat requests to hosts without models: pass them on, refuse them, or pass them on and list the hosts."""
ADDON = Path(__file__).with_name("addon.py")
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class Mitmproxy(VenvPackage):
    name = "mitmproxy"
    default_version = "11.0.2"
    imports = "mitmproxy.tools.main"


class InterceptionError(PolarError):
    """The proxy cannot be started, or it ended."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """How a proxy treats requests."""

    gateway: str
    """URL of the gateway, without /v1."""
    key: str
    """Key of the session that records the calls."""
    record: bool = False
    """True if the provider answers the calls, with the program's own key. The gateway then gets only the requests that
    it passes on to the provider (`PathRule.passed_on`); all others go directly to the provider."""
    others: Others = "pass"

    def to_json(self) -> Json:
        """Return the settings in the form in which the addon reads them."""
        return {
            "gateway": self.gateway,
            "prefix": f"/s/{self.key}{INTERCEPT_PREFIX}",
            "record": self.record,
            "others": self.others,
            "hosts": rules_for_proxy(record=self.record),
        }


@contextlib.contextmanager
def run_proxy(
    installed: Installation, authority: CertificateAuthority, settings: ProxySettings, on_event: Callable[[Json], None]
) -> Iterator[int]:
    """Run mitmproxy until the block ends, and yield its port on loopback. Blocking. Raises InterceptionError.

    A thread calls `on_event` with each event of the addon. The end of the block waits for the last of these calls.
    """
    with temporary_folder() as folder:
        file, log = folder / "settings.json", folder / "log"
        file.touch(0o600)  # it holds the session's key
        file.write_text(json.dumps(settings.to_json()))
        argv = [
            str(installed.root / "bin" / "mitmdump"),
            *("--quiet", "--listen-host", "127.0.0.1", "--listen-port", "0", "--scripts", str(ADDON)),
            *("--set", f"confdir={authority.key_and_certificate.parent}", "--set", f"polar_settings={file}"),
            # Nothing connects to a host whose requests the gateway answers.
            *("--set", "connection_strategy=lazy", "--set", f"ssl_verify_upstream_trusted_ca={authority.bundle}"),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                env=child_environment({"PYTHONUNBUFFERED": "1"}),
                start_new_session=True,  # Ctrl-C is for the program
            )
        assert process.stdout is not None
        with process, ThreadPoolExecutor(1, "polar-proxy-events") as pool:
            timer = Timer(_START_SECONDS, process.kill)
            timer.start()
            try:
                port = _listening_port(process.stdout, log)
                timer.cancel()
                events = pool.submit(_follow, process.stdout, on_event)
                yield port
                process.terminate()
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()  # it is busy with its connections; the events that it printed are still read
                events.result(_STOP_SECONDS)
            finally:
                timer.cancel()
                process.kill()


def _listening_port(output: IO[bytes], log: Path) -> int:
    for line in output:
        event = _event(line)
        if event is not None and event["event"] == "listening":
            return int(event["port"])
    text = log.read_text(errors="replace").strip()[-1000:]
    raise InterceptionError(f"mitmproxy ended before it listened: {text or 'it printed nothing'}")


def _follow(output: IO[bytes], on_event: Callable[[Json], None]) -> None:
    for line in output:
        if (event := _event(line)) is not None:
            on_event(event)


def _event(line: bytes) -> Json | None:
    """Return the addon's event in a line; None for a line that mitmproxy printed."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
