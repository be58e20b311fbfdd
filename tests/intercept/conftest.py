"""mitmproxy in its own environment, installed once for each test run or taken from the cache in POLAR_CACHE_DIR."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.base import Installation
from polar_proxy.intercept.certificates import CertificateAuthority, open_authority
from polar_proxy.intercept.proxy import Mitmproxy, ProxySettings, run_proxy
from polar_proxy.types import Json


@dataclass
class RunningProxy:
    url: str
    authority: CertificateAuthority
    events: list[Json] = field(default_factory=list)


StartProxy = Callable[..., AbstractContextManager[RunningProxy]]


@pytest.fixture(scope="session")
def mitmproxy(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    cache = os.environ.get("POLAR_CACHE_DIR")
    return Mitmproxy().install(Path(cache) if cache else tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return open_authority(tmp_path_factory.mktemp("home"))


@pytest.fixture
def start_proxy(mitmproxy: Installation, authority: CertificateAuthority) -> StartProxy:
    """`with start_proxy(gateway.url, "my-key", **options) as proxy:` runs mitmproxy with Polar's addon."""

    @contextlib.contextmanager
    def start(gateway: str, key: str, **options: Any) -> Iterator[RunningProxy]:
        running = RunningProxy("", authority)
        settings = ProxySettings(gateway, key, **options)
        with run_proxy(mitmproxy, authority, settings, running.events.append) as port:
            running.url = f"http://127.0.0.1:{port}"
            yield running

    return start
