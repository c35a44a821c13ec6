"""Certificates and keys: what is taken, and what is said of those that are not."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from extproc import certificates
from extproc.certificates import files_of, load_certificates
from extproc.config import Config
from extproc.envoy_settings import client_tls
from extproc.errors import ConfigError
from extproc.named_files import check_certificates
from extproc.xds.model import ClientTls
from tests.e2e.certificates import Maker

pytestmark = pytest.mark.slow  # openssl makes the keys


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    return Maker(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def made(maker):
    """Make a certificate, whose key is on P-256."""
    return maker.make("router")


@pytest.fixture(scope="module")
def other(maker):
    return maker.make("other")


@pytest.fixture
def files(tmp_path, made):
    """Copy a pair that fits, and a CA, for a test to spoil."""
    tls = ClientTls(*(str(tmp_path / name) for name in ("tls.crt", "tls.key", "ca.crt")))
    for source, target in ((made.cert, tls.cert_file), (made.key, tls.key_file)):
        shutil.copy(source, target)
    shutil.copy(made.cert, tls.client_ca_file)
    return tls


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=50)


def append(path, text):
    write(path, Path(path).read_bytes() + text.encode())


def write(path, data):
    Path(path).write_bytes(data)


def cut(path):
    write(path, Path(path).read_bytes()[:100])


def self_signed(directory, *key):
    """Make a certificate for a key of the kind that openssl calls *key*."""
    cert, private = str(directory / "c.pem"), str(directory / "k.pem")
    command = ["req", "-x509", "-newkey", *key, "-nodes", "-days", "2", "-subj", "/CN=x"]
    openssl(*command, "-keyout", private, "-out", cert)
    return ClientTls(cert, private)


def test_files_are_taken_as_they_are(files, made):
    """All of their text goes to Envoy, remarks that are no ASCII aside."""
    append(files.client_ca_file, "# für später\n")
    without_ca = ClientTls(files.cert_file, files.key_file)

    found = load_certificates(files)

    assert (found.cert, found.key) == (made.cert.read_text(), made.key.read_text())
    assert found.client_ca.startswith(made.cert.read_text())
    assert load_certificates(without_ca).client_ca == ""
    assert files_of(files) == (files.cert_file, files.key_file, files.client_ca_file)
    assert files_of(without_ca) == (files.cert_file, files.key_file)


def test_nothing_shows_the_key(files):
    """Not when somebody prints what holds it."""
    found = load_certificates(files)

    assert repr(found) == str(found) == "Certificates()"


def test_chain_and_bundle_may_hold_several(files, other):
    """The first is the router's own; a CA file may hold any number."""
    for path in (files.cert_file, files.client_ca_file):
        append(path, other.cert.read_text())

    assert load_certificates(files).cert.count("BEGIN") == 2


def test_one_file_may_hold_both(files, made):
    """Certificate and key, in either order."""
    both = made.key.read_text() + made.cert.read_text()
    write(files.cert_file, both.encode())

    assert load_certificates(ClientTls(files.cert_file, files.cert_file)).key == both


@pytest.mark.parametrize(
    "key",
    [
        ("rsa", "-pkeyopt", "rsa_keygen_bits:2048"),
        ("ec", "-pkeyopt", "ec_paramgen_curve:P-384"),
        ("ec", "-pkeyopt", "ec_paramgen_curve:P-521"),
    ],
)
def test_kinds_of_keys_that_are_taken(tmp_path, key):
    """Envoy takes the same."""
    tls = self_signed(tmp_path, *key)

    assert load_certificates(tls).key.startswith("-----BEGIN")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("rsa", "-pkeyopt", "rsa_keygen_bits:1024"), "an RSA key of 1024 bits; at least 2048"),
        (("ec", "-pkeyopt", "ec_paramgen_curve:secp256k1"), "a curve that is not supported"),
        (("ed25519",), "a kind of key that is not supported; use RSA, or EC on P-256"),
    ],
)
def test_kinds_of_keys_that_envoy_would_refuse(tmp_path, key, message):
    """It is said at the start, rather than by Envoy later."""
    tls = self_signed(tmp_path, *key)

    with pytest.raises(ConfigError, match=message):
        load_certificates(tls)


def encrypt(files, *arguments):
    plain = f"{files.key_file}.plain"
    shutil.copy(files.key_file, plain)
    openssl(*arguments, "-in", plain, "-aes256", "-passout", "pass:x", "-out", files.key_file)


BROKEN = {
    "key of another": lambda f, o: shutil.copy(o.key, f.key_file),
    "key encrypted": lambda f, _: encrypt(f, "pkey"),
    "key encrypted in the old way": lambda f, _: encrypt(f, "ec"),
    "key cut": lambda f, _: cut(f.key_file),
    "key empty": lambda f, _: write(f.key_file, b""),
    "certificate as key": lambda f, _: shutil.copy(f.cert_file, f.key_file),
    "no certificate": lambda f, _: write(f.cert_file, b"hello\n"),
    "certificate empty": lambda f, _: write(f.cert_file, b""),
    "certificate in DER": lambda f, o: write(f.cert_file, o.der()),
    "certificate cut": lambda f, _: cut(f.cert_file),
    "certificate too large": lambda f, _: append(f.cert_file, "#" * 2**20),
    "chain spoilt": lambda f, _: append(f.cert_file, "-----BEGIN CERTIFICATE-----\nno\n"),
    "CA empty": lambda f, _: write(f.client_ca_file, b""),
    "CA spoilt": lambda f, _: append(
        f.client_ca_file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    ),
}
MESSAGES = {
    "key of another": "--tls-key: {key} is not the key of the certificate in {cert}",
    "key encrypted": "--tls-key: {key} is encrypted",
    "key encrypted in the old way": "--tls-key: {key} is encrypted",
    "key cut": "--tls-key: {key} holds no private key",
    "key empty": "--tls-key: {key} holds no private key",
    "certificate as key": "--tls-key: {key} holds no private key",
    "no certificate": "--tls-cert: {cert} holds no certificate",
    "certificate empty": "--tls-cert: {cert} holds no certificate",
    "certificate in DER": "--tls-cert: {cert} holds no certificate",
    "certificate cut": "--tls-cert: certificate 1 of {cert} cannot be read",
    "certificate too large": "--tls-cert: {cert} is larger than 1048576 bytes",
    "chain spoilt": "--tls-cert: certificate 2 of {cert} cannot be read",
    "CA empty": "--tls-client-ca: {ca} holds no certificate",
    "CA spoilt": "--tls-client-ca: certificate 2 of {ca} cannot be read",
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_used_is_named(files, other, case):
    """The file, what is wrong with it, and nothing of what it holds."""
    BROKEN[case](files, other)
    wanted = MESSAGES[case].format(
        key=files.key_file, cert=files.cert_file, ca=files.client_ca_file
    )

    with pytest.raises(ConfigError) as refused:
        load_certificates(files)

    assert wanted in str(refused.value)
    assert "MII" not in str(refused.value)


@pytest.mark.parametrize("name", ["cert_file", "key_file", "client_ca_file"])
def test_file_that_is_not_there(files, name):
    """Or that is a directory."""
    path = getattr(files, name)
    flag = {"cert_file": "--tls-cert", "key_file": "--tls-key"}.get(name, "--tls-client-ca")
    missing = dataclasses.replace(files, **{name: f"{path}.gone"})

    with pytest.raises(ConfigError, match=f"{flag}: cannot read {path}.gone: No such file"):
        load_certificates(missing)


def test_files_that_change_while_they_are_read(files, other, monkeypatch):
    """What OpenSSL found good is what Envoy gets: files that changed in between are read again."""
    changes = iter([True, False])
    check = certificates._check_pair

    def checked(tls):
        check(tls)
        if next(changes, False):
            shutil.copy(other.cert, tls.cert_file)
            shutil.copy(other.key, tls.key_file)

    monkeypatch.setattr(certificates, "_check_pair", checked)

    found = load_certificates(files)

    assert (found.cert, found.key) == (other.cert.read_text(), other.key.read_text())


def test_files_that_never_rest_are_refused(files, monkeypatch):
    """Rather than tried for ever."""
    check = certificates._check_pair

    def checked(tls):
        check(tls)
        append(tls.cert_file, "#\n")

    monkeypatch.setattr(certificates, "_check_pair", checked)

    with pytest.raises(ConfigError, match="keep changing"):
        load_certificates(files)


def test_configuration_names_the_files(files):
    """Without them clients are served over plain HTTP, and there is nothing to check."""
    config = Config(tls_cert=files.cert_file, tls_key=files.key_file)

    check_certificates(config)
    check_certificates(Config())

    assert client_tls(Config()) is None
    assert client_tls(config) == ClientTls(files.cert_file, files.key_file)
    write(files.key_file, b"")
    with pytest.raises(ConfigError, match="--tls-key"):
        check_certificates(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_cert": "a"}, "tls_cert: tls_key must be given too"),
        ({"tls_key": "a"}, "tls_key: tls_cert must be given too"),
        ({"tls_client_ca": "a"}, "tls_client_ca: tls_cert and tls_key must be given too"),
    ],
)
def test_half_a_pair_is_refused(given, message):
    """Clients served over plain HTTP by mistake would send their keys in the clear."""
    with pytest.raises(ValueError, match=message):
        Config(**given)
