"""The gateway: the HTTP server that agents talk to."""

from polar_proxy.gateway.server import Gateway, is_loopback

__all__ = ["Gateway", "is_loopback"]
