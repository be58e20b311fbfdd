"""The gateway: the HTTP server that agents talk to."""

from polar_proxy.gateway.app import is_loopback
from polar_proxy.gateway.server import Gateway, local_url

__all__ = ["Gateway", "is_loopback", "local_url"]
