"""Certificates for the tests, made with openssl."""

from __future__ import annotations

import dataclasses
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Files in PEM."""

    cert: Path
    key: Path

    def der(self) -> bytes:
        """Return the certificate as a peer gets it."""
        return ssl.PEM_cert_to_DER_cert(self.cert.read_text())


class Maker:
    """Makes certificates in *directory*, which vouch for themselves or are vouched for."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl on PATH")
        self._directory = directory

    def make(self, name: str, *arguments: str) -> Certificate:
        """Make a certificate by itself: of a CA, unless *arguments* of openssl say otherwise."""
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
        command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", f"/CN={name}"]
        command += ["-keyout", str(made.key), "-out", str(made.cert), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        return made

    def sign(self, name: str, ca: Certificate, alternative: str) -> Certificate:
        """Make a certificate for the *alternative* name that *ca* vouches for."""
        leaf = ("-addext", f"subjectAltName={alternative}", "-addext", "basicConstraints=CA:FALSE")
        return self.make(name, "-CA", str(ca.cert), "-CAkey", str(ca.key), *leaf)
