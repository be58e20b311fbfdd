"""Interception in sandboxes: the names of model hosts resolve to a socket of the gateway inside the sandbox.

No proxy is involved, so the calls of programs that ignore proxies are answered too. The socket presents certificates of
this machine's certificate authority, and belongs to the session of the rollout: keys that the program sends are not
read. Everything else stays unreachable.

Programs find the authority in the system's file of certificates. Programs that do not read this file (Node.js, Python,
Java) find the authority by environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

from polar_proxy.errors import UsageError
from polar_proxy.gateway import Gateway
from polar_proxy.intercept.certificates import CertificateAuthority, open_authority
from polar_proxy.intercept.hosts import host_names
from polar_proxy.intercept.variables import trust_variables
from sandboxes.base import HTTPS_PORT, Mount, Sandbox, SandboxKind, SandboxSpec

_SYSTEM_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
"""Path of the system's certificates on Debian, Ubuntu, Alpine, Arch and other systems."""


class SandboxInterception:
    def __init__(self, home: Path | None, own_hosts: Iterable[str] = ()) -> None:
        """`home`: Polar's home, in which the certificate authority is made at its first use. `own_hosts`: the setting
        `gateway.model_hosts`."""
        self._home = home
        self._hosts = host_names(own_hosts)

    async def spec(self, kind: SandboxKind, spec: SandboxSpec) -> SandboxSpec:
        """Return the specification with the model hosts' names and the authority's certificate.

        Raises UsageError for a process sandbox.
        """
        if kind == "process":
            raise UsageError(
                "This agent's calls have to be intercepted. A process sandbox cannot do this, because it uses the "
                "host's network: use --sandbox bubblewrap or docker."
            )
        authority = await self._authority()
        files = (authority.certificate, authority.bundle, authority.java_store)
        mounts = [Mount(file, str(file)) for file in files]
        if kind == "docker" or Path(_SYSTEM_BUNDLE).is_file():
            mounts.append(Mount(authority.bundle, _SYSTEM_BUNDLE))
        env = {**trust_variables(authority), **spec.env}
        return replace(spec, hosts=self._hosts, mounts=(*spec.mounts, *mounts), env=env)

    @contextlib.asynccontextmanager
    async def serve(self, gateway: Gateway, sandbox: Sandbox, key: str) -> AsyncIterator[None]:
        """Answer requests to the model hosts inside a sandbox until the block ends. `key`: the key of the recording
        session."""
        authority = await self._authority()
        tls = await asyncio.to_thread(authority.server_context, self._hosts)
        listener = await sandbox.listen(HTTPS_PORT)
        assert listener is not None  # only a process sandbox has no network of its own
        await gateway.serve_on(listener, tls=tls, key=key)
        try:
            yield
        finally:
            await gateway.stop_serving_on(listener)

    async def _authority(self) -> CertificateAuthority:
        if self._home is None:
            raise UsageError(
                "Interception needs a certificate authority, and this rollout service was started without a folder for "
                "it: give RolloutService the argument `home`."
            )
        return await asyncio.to_thread(open_authority, self._home)
