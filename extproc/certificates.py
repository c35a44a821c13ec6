"""Reads the certificate, the key and the CA with which clients are served, and sees that Envoy will take them.

A pair that does not fit, or a file that is half written, must never replace one that works: all of it is
checked before Envoy hears of it.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from extproc.errors import ConfigError
from extproc.x509 import unusable_key
from extproc.xds.model import Certificates, ClientTls

MAX_FILE_BYTES = 2**20
ATTEMPTS = 5
"""Readings that may find the files changing."""

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_MISMATCHES = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})


class _EncryptedKeyError(Exception):
    """The key asks for a passphrase."""


def load_certificates(tls: ClientTls) -> Certificates:
    """Return what the files hold; ``ConfigError`` names the one that cannot be used, and why."""
    for _ in range(ATTEMPTS):
        found = _read(tls)
        _check_pair(tls)
        if tls.client_ca_file:
            _check_ca(tls.client_ca_file)
        # OpenSSL has read the files itself: what it found good is what we hold only if they are the same.
        if _read(tls) == found:
            return found
    raise ConfigError(f"--tls-cert and --tls-key: {tls.cert_file} and {tls.key_file} keep changing")


def files_of(tls: ClientTls) -> tuple[str, ...]:
    """Return the files that are to be watched."""
    return tuple(filter(None, (tls.cert_file, tls.key_file, tls.client_ca_file)))


def _read(tls: ClientTls) -> Certificates:
    return Certificates(
        cert=_text("--tls-cert", tls.cert_file),
        key=_text("--tls-key", tls.key_file),
        client_ca=_text("--tls-client-ca", tls.client_ca_file) if tls.client_ca_file else "",
    )


def _text(flag: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise ConfigError(f"{flag}: cannot read {path}: {reason}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{flag}: {path} is larger than {MAX_FILE_BYTES} bytes")
    return data.decode(errors="replace")  # what is not ASCII can only be a remark


def _check_pair(tls: ClientTls) -> None:
    _check_chain(tls.cert_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password=_refuse_password)
    except _EncryptedKeyError as error:
        raise ConfigError(
            f"--tls-key: {tls.key_file} is encrypted, and there is nobody to ask for the passphrase;"
            " give a key without one (openssl pkey -in KEY -out PLAIN_KEY)"
        ) from error
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            raise ConfigError(
                f"--tls-key: {tls.key_file} is not the key of the certificate in {tls.cert_file}"
            ) from error
        # The certificate has been read before: what OpenSSL stumbles over now is the key.
        raise ConfigError(
            f"--tls-key: {tls.key_file} holds no private key in PEM that can be used"
            f" ({_reason(error)})"
        ) from error
    except OSError as error:
        raise ConfigError(f"--tls-key: cannot read {tls.key_file}: {error.strerror}") from error


def _check_chain(path: str) -> None:
    """Refuse a chain that is none, and a certificate for a key of a kind that Envoy does not take."""
    leaf, *_ = _load_all("--tls-cert", path)
    try:
        problem = unusable_key(leaf)
    except ValueError as error:
        raise ConfigError(f"--tls-cert: {path} cannot be read ({error})") from error
    if problem:
        raise ConfigError(f"--tls-cert: {path} is for {problem}")


def _check_ca(path: str) -> None:
    _load_all("--tls-client-ca", path)


def _load_all(flag: str, path: str) -> list[bytes]:
    """Return every certificate of a file, in DER."""
    blocks = _text(flag, path).split(_BEGIN)[1:]
    if not blocks:
        raise ConfigError(f"{flag}: {path} holds no certificate in PEM")
    found = []
    for number, block in enumerate(blocks, start=1):
        body, end, _ = block.partition(_END)
        try:
            # Without its end, if it has none: that is refused then.
            der = ssl.PEM_cert_to_DER_cert(f"{_BEGIN}{body}{end}")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_verify_locations(cadata=der)
        except (ValueError, ssl.SSLError) as error:
            reason = _reason(error) if isinstance(error, ssl.SSLError) else str(error)
            raise ConfigError(
                f"{flag}: certificate {number} of {path} cannot be read ({reason})"
            ) from error
        found.append(der)
    return found


def _refuse_password() -> str:
    raise _EncryptedKeyError


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not PEM").lower().replace("_", " ")
