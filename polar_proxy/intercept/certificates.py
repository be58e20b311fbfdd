"""The certificate authority (CA) of this machine, and the files that make programs trust it.

Promises:

* The CA is made at its first use in the folder `intercept` of Polar's home. Its private key is readable by this user
  alone (mode 600), also while it is written, and is never given to a sandbox.
* Nothing is installed in the system's or the user's own stores. Only programs that Polar starts trust the CA.
* If a variable or mount replaces a program's certificates, the replacement is a bundle of the system's certificates and
  this CA. So hosts that are not intercepted are still verified.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import ssl
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polar_proxy.atomic_file import replace_file
from polar_proxy.errors import UsageError

JAVA_PASSWORD = "changeit"
"""Password of the trust store for Java, the same as that of Java's default trust store. The store holds no secret."""
_CA_DAYS, _LEAF_DAYS, _RENEW_DAYS = 3650, 90, 30
_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """The files of the CA. Anyone may read the files that hold no private key."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def key_and_certificate(self) -> Path:
        """The CA's private key and certificate, in the form and under the name that mitmproxy reads from its folder."""
        return self.folder / "private" / "mitmproxy-ca.pem"

    @property
    def bundle(self) -> Path:
        """The file with the system's certificates and that of the CA."""
        return self.folder / "bundle.pem"

    @property
    def java_store(self) -> Path:
        return self.folder / "java.p12"

    def server_context(self, names: Sequence[str]) -> ssl.SSLContext:
        """Return a TLS server context with a new certificate for the hosts `names`. It offers HTTP/1.1 only.
        Blocking."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        ca_key = serialization.load_pem_private_key(self.key_and_certificate.read_bytes(), None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
        builder = _builder("Polar interception", issuer.subject, key, _LEAF_DAYS)
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        for extension in (alternatives, usage, authority):
            builder = builder.add_extension(extension, critical=False)
        leaf = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        certificate = leaf.sign(ca_key, hashes.SHA256())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with tempfile.NamedTemporaryFile(prefix="polar-leaf-") as file:  # created with mode 600
            file.write(_private_pem(key) + certificate.public_bytes(serialization.Encoding.PEM))
            file.flush()
            context.load_cert_chain(file.name)
        return context


def open_authority(home: Path) -> CertificateAuthority:
    """Return the CA in Polar's home, made or renewed first if necessary. Safe to call from several processes. Blocking.

    Raises UsageError if this machine has no system certificates.
    """
    authority = CertificateAuthority(home / "intercept")
    authority.key_and_certificate.parent.mkdir(parents=True, exist_ok=True)
    authority.key_and_certificate.parent.chmod(0o700)
    with (authority.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_valid(authority):
            _make(authority)
        _write_trust_files(authority)
    return authority


def is_made(home: Path) -> bool:
    return CertificateAuthority(home / "intercept").certificate.exists()


def _is_valid(authority: CertificateAuthority) -> bool:
    if not (authority.key_and_certificate.exists() and authority.certificate.exists()):
        return False
    certificate = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    renew = datetime.timedelta(days=_RENEW_DAYS)
    return certificate.not_valid_after_utc - renew > datetime.datetime.now(datetime.UTC)


def _make(authority: CertificateAuthority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Polar interception, this machine only")])
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(**unused, key_cert_sign=True, crl_sign=True)
    builder = _builder("Polar interception, this machine only", name, key, _CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    replace_file(authority.key_and_certificate, _private_pem(key) + pem, 0o600)
    replace_file(authority.certificate, pem, 0o644)


def _builder(
    common_name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _write_trust_files(authority: CertificateAuthority) -> None:
    """Write the bundle (the system's current certificates and the CA's) and Java's trust store, if they changed."""
    system = _system_bundle(authority.folder)
    pem = system.read_bytes().rstrip() + b"\n" + authority.certificate.read_bytes()
    if authority.bundle.exists() and authority.java_store.exists() and authority.bundle.read_bytes() == pem:
        return
    trusted = [pkcs12.PKCS12Certificate(one, b"polar-%d" % number) for number, one in enumerate(_readable(pem))]
    store = pkcs12.serialize_java_truststore(trusted, serialization.BestAvailableEncryption(JAVA_PASSWORD.encode()))
    replace_file(authority.bundle, pem, 0o644)
    replace_file(authority.java_store, store, 0o644)


def _readable(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates in a bundle, except certificates that the library `cryptography` rejects or warns about
    (bad serial numbers)."""
    end = b"-----END CERTIFICATE-----"
    found = []
    for part in pem.split(end)[:-1]:
        with warnings.catch_warnings(), contextlib.suppress(ValueError, UserWarning):
            warnings.simplefilter("error")
            found.append(x509.load_pem_x509_certificate(part + end))
    return found


def _system_bundle(own_folder: Path) -> Path:
    """Return the file of certificates that programs of this machine trust: SSL_CERT_FILE, or the system's file.

    A file in `own_folder` is skipped, because it is Polar's own bundle: in an intercepted program, SSL_CERT_FILE names
    this bundle. Raises UsageError if there is no other file.
    """
    for name in (ssl.get_default_verify_paths().cafile, *_SYSTEM_BUNDLES):  # the first is SSL_CERT_FILE, if it is set
        if name is not None and os.path.isfile(name) and Path(name).parent != own_folder:
            return Path(name)
    raise UsageError("This machine has no file of certificates: install the package ca-certificates.")


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encryption = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, encryption)
