"""The addon of mitmproxy: sends the requests for model hosts to the gateway. Runs in mitmproxy's own environment.

It imports nothing of Polar, and reads its settings from the file named by the option `polar_settings`:

    {"gateway": "http://127.0.0.1:8399", "prefix": "/s/KEY/intercept/", "record": false, "others": "pass",
     "hosts": [{"hosts": ["pattern", ...], "paths": ["pattern", ...]}, ...]}

Promises:

* TLS to a host that is not a model host passes through untouched: it is not decrypted, and the program verifies the
  host itself.
* Where Polar answers, every header and parameter that may hold the program's own key is removed before the request goes
  on. Where the provider answers (`record`), the gateway gets these headers and parameters, too, and passes them on.
* Nothing of a request or an answer is printed or kept; answers are streamed.

Events are printed as one JSON object in each line: `listening` (port), `refused` and `other` (a request for a host that
is not a model host was refused or passed on), `untrusted` (the program did not accept the certificate for a host),
`unreachable` (the gateway did not answer).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mitmproxy import connection, ctx, http, tls
from mitmproxy.proxy.context import Context

KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "x-amz-security-token", "cookie", "origin")
KEY_PARAMETERS = ("key", "api_key", "access_token")


class GatewayAddon:
    """The addon. Its public methods are hooks of mitmproxy."""

    def __init__(self) -> None:
        self._gateway = self._prefix = self._others = ""
        self._record = False
        self._model_hosts: list[tuple[re.Pattern[str], re.Pattern[str]]] = []
        """Pairs of patterns: host names, and the paths of these hosts that go to the gateway."""
        self._reported: set[tuple[str, str]] = set()
        """Pairs (event, host) that were printed."""
        self._connected: set[str] = set()
        """Model hosts to which the program has opened a connection."""
        self._requested: set[str] = set()
        """Model hosts to which the program has sent a request."""

    def load(self, loader: Any) -> None:
        loader.add_option("polar_settings", str, "", "File with the settings of this addon.")

    def configure(self, updated: set[str]) -> None:
        if "polar_settings" not in updated or not ctx.options.polar_settings:
            return
        settings = json.loads(Path(ctx.options.polar_settings).read_text())
        self._gateway, self._prefix = settings["gateway"], settings["prefix"]
        self._record, self._others = settings["record"], settings["others"]
        self._model_hosts = [
            (re.compile("|".join(row["hosts"])), re.compile("|".join(row["paths"]))) for row in settings["hosts"]
        ]

    def running(self) -> None:
        addresses = ctx.master.addons.get("proxyserver").listen_addrs()
        print(json.dumps({"event": "listening", "port": addresses[0][1]}), flush=True)

    def done(self) -> None:
        """Report hosts to which the program connected without sending a request, probably because it does not trust the
        CA."""
        for host in sorted(self._connected - self._requested):
            self._report("untrusted", host, reason="it closed the connection before its first request")

    def http_connect(self, flow: http.HTTPFlow) -> None:
        if self._paths_of(flow.request.host) is None:
            self._report_or_refuse(flow)

    def tls_clienthello(self, data: tls.ClientHelloData) -> None:
        host = _requested_host(data.client_hello.sni, data.context)
        data.ignore_connection = self._paths_of(host) is None

    def tls_established_client(self, data: tls.TlsData) -> None:
        self._connected.add(_requested_host(data.conn.sni, data.context))

    def tls_failed_client(self, data: tls.TlsData) -> None:
        self._report("untrusted", _requested_host(data.conn.sni, data.context), reason=data.conn.error or "")

    def request(self, flow: http.HTTPFlow) -> None:
        request = flow.request
        host = request.host.lower()
        paths = self._paths_of(host)
        if paths is None:
            self._report_or_refuse(flow)
            return
        self._requested.add(host)
        path, _, query = request.path.partition("?")
        if paths.fullmatch(path) is None:
            return  # to the host itself
        if not self._record:
            for name in KEY_HEADERS:
                request.headers.pop(name, None)
            parts = [part for part in query.split("&") if part.partition("=")[0] not in KEY_PARAMETERS]
            query = "&".join(filter(None, parts))
        request.decode(strict=False)  # some agents compress their requests; the gateway reads plain ones
        flow.metadata["polar_host"] = host
        # The URL is set as a whole: it replaces the header Host and HTTP/2's authority too.
        request.url = self._gateway + self._prefix + quote(host) + path + ("?" + query if query else "")
        request.http_version = "HTTP/1.1"

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        if flow.response is not None:
            flow.response.stream = True

    def error(self, flow: http.HTTPFlow) -> None:
        host = flow.metadata.get("polar_host")
        refused = flow.server_conn.state is connection.ConnectionState.CLOSED and flow.response is None
        if host is not None and refused and flow.error is not None:
            self._report("unreachable", host, reason=flow.error.msg)

    def _paths_of(self, host: str) -> re.Pattern[str] | None:
        """Return the pattern of the paths of `host` that go to the gateway; None if `host` is not a model host."""
        return next((paths for names, paths in self._model_hosts if names.fullmatch(host.lower())), None)

    def _report_or_refuse(self, flow: http.HTTPFlow) -> None:
        """Report a request for a host without models, and refuse it if the setting `others` is `refuse`."""
        host = flow.request.host
        if self._others == "refuse":
            self._report("refused", host)
            flow.response = http.Response.make(403, f"polar intercept refuses {host}: it is not a model host.\n")
        else:
            self._report("other", host)

    def _report(self, event: str, host: str, **more: str) -> None:
        """Print an event, unless the same event of the same host was printed before."""
        if (event, host) not in self._reported:
            self._reported.add((event, host))
            print(json.dumps({"event": event, "host": host, **more}), flush=True)


def _requested_host(sni: str | None, context: Context) -> str:
    """Return the host of a TLS connection in lower case: the name in the handshake, or else the address."""
    address = context.server.address
    return (sni or (address[0] if address else "")).lower()


addons = [GatewayAddon()]
