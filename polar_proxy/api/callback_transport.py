"""The HTTP transport of callbacks, which connects to public addresses only.

A callback URL comes with a request, and its host name can lead anywhere: to services on this machine, to services on
the network of this machine, or to the metadata service of a cloud. So the name is resolved here, every address is
checked, and the connection is made to exactly the address that was checked. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import httpx

from polar_proxy.errors import UsageError

_ADVICE = "set api.private_callbacks = true if receivers of callbacks may be on this machine or its network"
_TRANSLATED = tuple(ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48"))
"""The networks of NAT64 (RFC 6052, RFC 8215), whose addresses have an IPv4 address in their last 32 bits."""


class PublicTransport(httpx.AsyncHTTPTransport):
    """An httpx transport to public addresses. Raises httpx.ConnectError if any address of the host is not public."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        address = await _public_address(host, request)
        # The certificate must still be that of the name. The header Host has the name already.
        request.extensions = {**request.extensions, "sni_hostname": host}
        request.url = request.url.copy_with(host=address)
        return await super().handle_async_request(request)


def check_public_host(host: str) -> None:
    """Raise UsageError for localhost and for an IP address that is not public. Other host names are not resolved
    here."""
    if host.rstrip(".") == "localhost" or host.rstrip(".").endswith(".localhost") or _is_blocked_address(host):
        raise UsageError(f"callback_url: {host} is not a public address; {_ADVICE}.")


async def _public_address(host: str, request: httpx.Request) -> str:
    port = request.url.port or (443 if request.url.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpx.ConnectError(f"{host} cannot be resolved: {error}", request=request) from error
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if _is_blocked_address(address):
            raise httpx.ConnectError(
                f"{host} has the address {address}, which is not public; {_ADVICE}", request=request
            )
    return addresses[0]


def _is_blocked_address(text: str) -> bool:
    """Return whether `text` is an IP address that is not public. False for a host name, which is not resolved here."""
    try:
        address = ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    embedded: list[ipaddress.IPv4Address | None] = []
    if isinstance(address, ipaddress.IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _TRANSLATED):
            embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return any(not one.is_global or one.is_multicast for one in (address, *embedded) if one is not None)
