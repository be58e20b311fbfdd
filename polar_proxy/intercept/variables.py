"""The environment of an intercepted program: the proxy and the trusted certificates, under every name that programs
look for.

`tests/intercept/test_proxy.py` and `test_real_agents.py` start real programs with these variables.
"""

from __future__ import annotations

from polar_proxy.intercept.certificates import JAVA_PASSWORD, CertificateAuthority

_LOOPBACK = "localhost,127.0.0.1,::1"
_REPLACING = (
    "SSL_CERT_FILE",  # OpenSSL, Go, rustls, Python, Ruby
    "REQUESTS_CA_BUNDLE",  # Python's requests
    "CURL_CA_BUNDLE",
    "AWS_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "CARGO_HTTP_CAINFO",
    "NIX_SSL_CERT_FILE",
)
"""Variables that name a file of certificates. Programs use this file instead of the system's certificates."""
_ADDING = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")
"""Variables that name a file of certificates. Programs trust these in addition to their usual certificates."""


def trust_variables(authority: CertificateAuthority) -> dict[str, str]:
    """Return the variables that let programs trust the CA in addition to the system's certificates."""
    store = f"-Djavax.net.ssl.trustStore={authority.java_store} -Djavax.net.ssl.trustStorePassword={JAVA_PASSWORD}"
    return {
        **dict.fromkeys(_REPLACING, str(authority.bundle)),
        **dict.fromkeys(_ADDING, str(authority.certificate)),
        "JAVA_TOOL_OPTIONS": store,
    }


def proxy_variables(port: int) -> dict[str, str]:
    """Return the variables by which programs use the HTTP proxy at `port` of loopback."""
    url = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    java = [f"-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort={port}" for scheme in ("http", "https")]
    return {
        **dict.fromkeys((*names, *map(str.lower, names)), url),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), _LOOPBACK),
        "NODE_USE_ENV_PROXY": "1",  # Node.js from 22.21 and 24 on; older ones use the proxy only if the program does
        "JAVA_TOOL_OPTIONS": " ".join([*java, "-Dhttp.nonProxyHosts=localhost|127.*|[::1]"]),
    }


def intercepted_variables(authority: CertificateAuthority, port: int) -> dict[str, str]:
    """Return the whole environment that `polar intercept` adds."""
    trust, proxy = trust_variables(authority), proxy_variables(port)
    java = f"{trust['JAVA_TOOL_OPTIONS']} {proxy['JAVA_TOOL_OPTIONS']}"
    return {**trust, **proxy, "JAVA_TOOL_OPTIONS": java}
