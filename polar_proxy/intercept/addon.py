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

Events are printed as one JSON object in each line: `listening` (port), `refused` and `other` (requested host that is
not a model host), `untrusted` (host whose certificate the program did not accept), `unreachable` (the gateway did not
answer).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mitmproxy import connection, ctx, http, tls

KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key", "x-amz-security-token", "cookie", "origin")
KEY_PARAMETERS = ("key", "api_key", "access_token")


class ModelHosts:
    def __init__(self) -> None:
        self.gateway = self.prefix = self.others = ""
        self.record = False
        self.hosts: list[tuple[re.Pattern[str], re.Pattern[str]]] = []
        self.seen: set[tuple[str, str]] = set()
        self.opened: set[str] = set()
        """Model hosts to which the program has opened a connection."""
        self.asked: set[str] = set()
        """Model hosts to which the program has sent a request."""

    def load(self, loader: Any) -> None:
        loader.add_option("polar_settings", str, "", "File with the settings of this addon.")

    def configure(self, updated: set[str]) -> None:
        if "polar_settings" not in updated or not ctx.options.polar_settings:
            return
        settings = json.loads(Path(ctx.options.polar_settings).read_text())
        self.gateway, self.prefix = settings["gateway"], settings["prefix"]
        self.record, self.others = settings["record"], settings["others"]
        self.hosts = [
            (re.compile("|".join(row["hosts"])), re.compile("|".join(row["paths"]))) for row in settings["hosts"]
        ]

    def running(self) -> None:
        addresses = ctx.master.addons.get("proxyserver").listen_addrs()
        print(json.dumps({"event": "listening", "port": addresses[0][1]}), flush=True)

    def paths_of(self, host: str) -> re.Pattern[str] | None:
        """Return the pattern of the paths of `host` that go to the gateway; None if `host` is not a model host."""
        return next((paths for names, paths in self.hosts if names.fullmatch(host.lower())), None)

    def report(self, event: str, host: str, **more: str) -> None:
        if (event, host) not in self.seen:
            self.seen.add((event, host))
            print(json.dumps({"event": event, "host": host, **more}), flush=True)

    # Hooks of mitmproxy

    def done(self) -> None:
        """Report hosts to which the program connected without sending a request, probably because it does not trust the
        CA."""
        for host in sorted(self.opened - self.asked):
            self.report("untrusted", host, reason="it closed the connection before its first request")

    def http_connect(self, flow: http.HTTPFlow) -> None:
        self.other_host(flow)

    def other_host(self, flow: http.HTTPFlow) -> None:
        """Report a request to a host without models, and refuse it if the setting `others` is `refuse`."""
        host = flow.request.host
        if self.paths_of(host) is not None:
            return
        if self.others == "refuse":
            self.report("refused", host)
            flow.response = http.Response.make(403, f"polar intercept refuses {host}: it is not a model host.\n")
        else:
            self.report("other", host)

    def tls_clienthello(self, data: tls.ClientHelloData) -> None:
        address = data.context.server.address
        host = data.client_hello.sni or (address[0] if address else "")
        data.ignore_connection = self.paths_of(host) is None

    def tls_established_client(self, data: tls.TlsData) -> None:
        self.opened.add(data.conn.sni or (data.context.server.address or ("",))[0])

    def tls_failed_client(self, data: tls.TlsData) -> None:
        host = data.conn.sni or (data.context.server.address or ("",))[0]
        self.report("untrusted", host, reason=data.conn.error or "")

    def request(self, flow: http.HTTPFlow) -> None:
        request = flow.request
        host = request.host.lower()
        paths = self.paths_of(host)
        if paths is None:
            self.other_host(flow)
            return
        self.asked.add(host)
        path, _, query = request.path.partition("?")
        if paths.fullmatch(path) is None:
            return  # to the host itself
        if not self.record:
            for name in KEY_HEADERS:
                request.headers.pop(name, None)
            parts = [part for part in query.split("&") if part.partition("=")[0] not in KEY_PARAMETERS]
            query = "&".join(filter(None, parts))
        request.decode(strict=False)  # some agents compress their requests; the gateway reads plain ones
        flow.metadata["polar_host"] = host
        # The URL is set as a whole: it replaces the header Host and HTTP/2's authority too.
        request.url = self.gateway + self.prefix + quote(host) + path + ("?" + query if query else "")
        request.http_version = "HTTP/1.1"

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        if flow.response is not None:
            flow.response.stream = True

    def error(self, flow: http.HTTPFlow) -> None:
        host = flow.metadata.get("polar_host")
        refused = flow.server_conn.state is connection.ConnectionState.CLOSED and flow.response is None
        if host is not None and refused and flow.error is not None:
            self.report("unreachable", host, reason=flow.error.msg)


addons = [ModelHosts()]
