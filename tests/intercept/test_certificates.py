"""The certificate authority of this machine: file modes, renewal, and that clients verify with it."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import pkcs12

from polar_proxy.intercept import certificates
from polar_proxy.intercept.certificates import JAVA_PASSWORD, open_authority
from polar_proxy.intercept.variables import intercepted_variables


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_can_read_the_private_key(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    assert (mode(authority.key_and_certificate), mode(authority.key_and_certificate.parent)) == (0o600, 0o700)
    for public in (authority.certificate, authority.bundle, authority.java_store):
        assert (mode(public), b"PRIVATE" in public.read_bytes()) == (0o644, False)


def test_the_authority_is_made_once_by_many_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_authority(tmp_path).certificate.read_bytes(), range(8)))
    assert len(set(found)) == 1


def test_an_authority_that_soon_expires_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_CA_DAYS", 20)
    first = open_authority(tmp_path).certificate.read_bytes()
    monkeypatch.undo()
    renewed = x509.load_pem_x509_certificate(open_authority(tmp_path).certificate.read_bytes())
    assert renewed.not_valid_after_utc > datetime.now(UTC) + timedelta(days=3000)
    assert x509.load_pem_x509_certificate(first).serial_number != renewed.serial_number


def test_the_bundle_has_the_systems_certificates_and_the_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system.pem"
    shutil.copy(open_authority(tmp_path / "other").certificate, system)
    monkeypatch.setenv("SSL_CERT_FILE", str(system))
    authority = open_authority(tmp_path / "home")
    assert authority.bundle.read_bytes().startswith(system.read_bytes())
    # Inside of an intercepted program, the variable names the bundle itself, which must not grow.
    size = authority.bundle.stat().st_size
    system.unlink()
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))
    monkeypatch.setattr(certificates, "_SYSTEM_BUNDLES", (str(open_authority(tmp_path / "other").certificate),))
    assert open_authority(tmp_path / "home").bundle.stat().st_size == size


def test_javas_trust_store_has_the_authority(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    store = pkcs12.load_pkcs12(authority.java_store.read_bytes(), JAVA_PASSWORD.encode())
    ours = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    assert ours in [one.certificate for one in store.additional_certs]


def test_every_variable_names_an_existing_file(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    variables = intercepted_variables(authority, 8080)
    files = {name: value for name, value in variables.items() if value.startswith("/")}
    assert {"SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"} <= set(
        files
    )
    assert {"DENO_CERT", "GIT_SSL_CAINFO"} <= set(files)
    assert all(Path(file).is_file() for file in files.values())
    assert str(authority.java_store) in variables["JAVA_TOOL_OPTIONS"]
    assert variables["HTTPS_PROXY"] == variables["https_proxy"] == "http://127.0.0.1:8080"
    assert "127.0.0.1" in variables["NO_PROXY"]


@pytest.mark.parametrize("name", ["api.openai.com", "api.anthropic.com"])
async def test_a_client_verifies_the_servers_name(tmp_path: Path, name: str) -> None:
    authority = open_authority(tmp_path)
    server = await asyncio.start_server(_close, "127.0.0.1", 0, ssl=authority.server_context(["api.openai.com"]))
    port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    async with server:
        if name == "api.openai.com":
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname=name)
            writer.close()
        else:
            with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch"):
                await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname=name)


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def test_a_missing_bundle_of_the_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(certificates, "_SYSTEM_BUNDLES", ())
    with pytest.raises(certificates.UsageError, match="install the package ca-certificates"):
        open_authority(tmp_path)
