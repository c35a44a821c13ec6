"""Kinds of keys in certificates; those of real ones are in ``test_certificates``."""

from __future__ import annotations

import contextlib
import ssl

import pytest

from extproc.x509 import unusable_key
from tests.e2e.certificates import Maker

pytestmark = pytest.mark.slow  # openssl makes the key


@pytest.fixture(scope="module")
def der(tmp_path_factory):
    made = Maker(tmp_path_factory.mktemp("made")).make("a")
    return ssl.PEM_cert_to_DER_cert(made.cert.read_text())


def test_certificate_that_is_cut_anywhere_is_none(der):
    """Never another error, never a wrong answer."""
    for length in range(len(der)):
        with pytest.raises(ValueError, match="it ends too early"):
            unusable_key(der[:length])

    assert unusable_key(der) == ""


def test_bytes_that_are_changed_are_no_crash(der):
    """Whatever stands where a length or a kind should."""
    for position in range(len(der)):
        for value in (0x00, 0x7F, 0x80, 0x84, 0xFF):
            spoilt = der[:position] + bytes([value]) + der[position + 1 :]
            with contextlib.suppress(ValueError):
                assert isinstance(unusable_key(spoilt), str)
