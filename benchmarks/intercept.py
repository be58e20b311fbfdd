"""Overhead of interception for each call: through mitmproxy, and by TLS to the gateway as inside a sandbox.

    python benchmarks/intercept.py --calls 300 --json

All ways use one gateway and take turns in every round, so that other load on the machine slows all of them alike;
compare the ratios. Calls follow each other on one kept connection, as an agent's do; `new connection` includes the TLS
handshake (and mitmproxy's certificate). The engine has no model and answers at once, so the times are the overhead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import ssl
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from polar_proxy.config import GatewaySettings, Settings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.intercept.certificates import CertificateAuthority, open_authority
from polar_proxy.intercept.hosts import host_names
from polar_proxy.intercept.proxy import Mitmproxy, ProxySettings, run_proxy
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import open_store

PATH = "/v1/chat/completions"
WAYS = ("direct", "proxy", "sandbox")
ANSWER = "word " * 40


class ResolvedTransport(httpx.AsyncHTTPTransport):
    """Sends requests for any host to one port of loopback, as a sandbox's file of hosts does."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(verify=context)
        self._port = port

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["sni_hostname"] = request.url.host
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return await super().handle_async_request(request)


def make_client(way: str, gateway: str, proxy_port: int, tls_port: int, authority: CertificateAuthority) -> Any:
    """Return a client whose base URL is the provider's, or the gateway's own for `direct`."""
    context = ssl.create_default_context(cafile=str(authority.bundle))
    headers = {"authorization": "Bearer benchmark"}
    if way == "direct":
        return httpx.AsyncClient(base_url=gateway, headers=headers, trust_env=False)
    options: dict[str, Any] = {"base_url": "https://api.openai.com", "headers": headers, "trust_env": False}
    if way == "proxy":
        return httpx.AsyncClient(proxy=f"http://127.0.0.1:{proxy_port}", verify=context, **options)
    return httpx.AsyncClient(transport=ResolvedTransport(tls_port, context), **options)


async def call(client: httpx.AsyncClient, number: int, stream: bool) -> float:
    """Return the seconds of one call."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}], "stream": stream}
    began = time.perf_counter()
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    return time.perf_counter() - began


async def measure(calls: int, gateway: Gateway, proxy_port: int, tls_port: int, authority: CertificateAuthority) -> Any:
    def client(way: str) -> Any:
        return make_client(way, gateway.url, proxy_port, tls_port, authority)

    times: dict[str, dict[str, list[float]]] = {}
    for kind, stream in (("unstreamed", False), ("streamed", True)):
        clients = {way: client(way) for way in WAYS}
        found = times.setdefault(kind, {way: [] for way in WAYS})
        for number in range(calls):
            for way, one in clients.items():
                found[way].append(await call(one, number, stream))
        for one in clients.values():
            await one.aclose()
    found = times.setdefault("new connection", {way: [] for way in WAYS})
    for number in range(max(20, calls // 10)):
        for way in WAYS:
            async with client(way) as one:
                found[way].append(await call(one, number, False))
    return times


async def run(calls: int) -> dict[str, Any]:
    installed = await asyncio.to_thread(Mitmproxy().install, Settings().harness_cache)
    with tempfile.TemporaryDirectory() as folder:
        authority = open_authority(Path(folder))
        engine = ScriptedEngine(lambda request: ANSWER, tokens_per_event=1)
        async with engine, open_store(f"sqlite:///{folder}/calls.db", create=True) as store:
            key = new_key()
            await store.sessions.create(key_hash=hash_key(key), label=None, policy=None, origin="key")
            async with Gateway(engine, store, GatewaySettings(port=0)) as gateway:
                listener = socket.create_server(("127.0.0.1", 0))
                listener.setblocking(False)
                await gateway.serve_on(listener, tls=authority.server_context(host_names()), key=key)
                settings = ProxySettings(gateway.url, "benchmark")
                with run_proxy(installed, authority, settings, lambda event: None) as port:
                    times = await measure(calls, gateway, port, listener.getsockname()[1], authority)
    return {kind: summary(of_kind) for kind, of_kind in times.items()}


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return median and 95th percentile in milliseconds, and the ratio of the medians to `direct`."""
    direct = statistics.median(times["direct"])
    return {
        way: {
            "median_ms": round(statistics.median(of_way) * 1000, 2),
            "p95_ms": round(statistics.quantiles(of_way, n=20)[-1] * 1000, 2),
            "ratio": round(statistics.median(of_way) / direct, 2),
        }
        for way, of_way in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(run(given.calls))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for kind, ways in found.items():
        for way, row in ways.items():
            print(f"{kind:16} {way:8} {row['median_ms']:8.2f} ms  p95 {row['p95_ms']:8.2f} ms  x{row['ratio']}")


if __name__ == "__main__":
    main()
