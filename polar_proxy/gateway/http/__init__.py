"""The HTTP server below the gateway: connections, WebSockets, limits, requests and answers of ASGI."""
