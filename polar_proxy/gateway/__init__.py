"""The gateway: the HTTP server that agents talk to."""

from polar_proxy.gateway.http.server import Gateway

__all__ = ["Gateway"]
