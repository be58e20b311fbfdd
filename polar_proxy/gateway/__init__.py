"""The gateway: session keys, the turn pipeline, streaming, its HTTP server."""

from polar_proxy.gateway.server import Gateway
from polar_proxy.sessions.registry import hash_key, new_key

__all__ = ["Gateway", "hash_key", "new_key"]
