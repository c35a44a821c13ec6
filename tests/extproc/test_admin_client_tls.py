"""What the command line says of files for TLS that it cannot use."""

from __future__ import annotations

import subprocess

import pytest

from extproc.admin_client import AdminClient, RouterError, RouterTls
from tests.e2e.certificates import Maker

pytestmark = pytest.mark.slow  # openssl makes the keys


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    return Maker(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def made(maker):
    return maker.make("a")


def refusal(**files):
    with pytest.raises(RouterError) as refused:
        AdminClient("https://router.example", tls=RouterTls(**files))
    return str(refused.value)


def test_files_that_are_not_there(made, tmp_path):
    """The flag and the file are named."""
    gone = str(tmp_path / "gone")

    assert f"--router-ca-file: cannot use {gone}: No such file" in refusal(ca_file=gone)
    assert f"--router-client-cert: cannot use {gone}" in refusal(client_cert=gone)
    both = refusal(client_cert=str(made.cert), client_key=gone)
    assert f"cannot use {made.cert} and {gone}: No such file" in both


def test_files_that_are_no_use(maker, made, tmp_path):
    """No PEM, a key of another, one that is encrypted, one without a certificate."""
    junk, encrypted = tmp_path / "junk", tmp_path / "encrypted.key"
    junk.write_text("hello\n")
    command = ["openssl", "pkey", "-in", str(made.key), "-aes256", "-passout", "pass:x"]
    subprocess.run([*command, "-out", str(encrypted)], check=True, capture_output=True, timeout=30)
    cert, other = str(made.cert), str(maker.make("other").key)

    assert "--router-ca-file: cannot use" in refusal(ca_file=str(junk))
    assert "--router-client-cert: cannot use" in refusal(client_cert=str(junk))
    assert "key values mismatch" in refusal(client_cert=cert, client_key=other)
    assert "the key is encrypted" in refusal(client_cert=cert, client_key=str(encrypted))
    assert "--router-client-cert must be given too" in refusal(client_key=other)


def test_plain_router_needs_none_of_them():
    """What is said about TLS is for https alone."""
    assert AdminClient("http://router.example", tls=RouterTls(ca_file="/gone")).url
