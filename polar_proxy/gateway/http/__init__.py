"""The HTTP server on which the gateway runs: connections, WebSockets, limits, routes and helpers for ASGI."""
