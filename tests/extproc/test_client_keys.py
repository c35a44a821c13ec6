"""Texts of key files in, what Envoy is given out."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.client_keys import parse_api_keys, parse_jwks, parse_passwords
from extproc.xds.model import ApiKey
from tests.signed_tokens import jwks

HASH = "{SHA}0DPiKuNIrrVmD8IUCuw1hQxNqZc="


def test_keys_stand_in_lines_with_the_name_of_their_client():
    """Remarks, blank lines, tabs, the line ends of Windows and a byte order mark do not matter."""
    text = "\ufeff# clients\r\n\r\n  team-a\tsk-a \r\nteam-b   sk-b\n#team-c sk-c\nteam-a sk-a2"

    assert parse_api_keys(text) == (
        ApiKey("team-a", "sk-a"),
        ApiKey("team-b", "sk-b"),
        ApiKey("team-a", "sk-a2"),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no key in it"),
        ("# nothing\n\n", "there is no key in it"),
        ("a sk-secret\nb sk-secret", "line 2: the same key stands in line 1"),
        ("a sk-secret\n\nsk-secret", "line 3: expected NAME KEY, got 1 words"),
        ("a sk-secret more", "line 1: expected NAME KEY, got 3 words"),
        ("a sk-s\u00e9cret", "line 1: expected visible ASCII characters only"),
        ("\u00e9 sk-secret", "line 1: expected visible ASCII characters only"),
        ("a sk-secret\x7f", "line 1: expected visible ASCII characters only"),
    ],
)
def test_faulty_keys_are_refused_by_line_and_not_repeated(text, reason):
    """The log may be read by others."""
    with pytest.raises(ValueError, match=r".") as refused:
        parse_api_keys(text)

    assert str(refused.value) == reason


def test_users_stand_in_lines_as_htpasswd_writes_them():
    """Remarks are left out; Envoy gets nothing else."""
    assert parse_passwords(f"# users\njoe:{HASH}\n\njack:{HASH}\n") == (
        f"joe:{HASH}\njack:{HASH}\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no user in it"),
        ("joe", "line 1: expected NAME:PASSWORD"),
        (f":{HASH}", "line 1: expected NAME:PASSWORD"),
        (f"j oe:{HASH}", "line 1: expected NAME:PASSWORD"),
        ("joe:plain", "line 1: the password is not hashed by SHA-1"),
        ("joe:$apr1$x$y", "htpasswd -s"),
        ("joe:$2y$05$secret", "htpasswd -s"),
        ("joe:{SHA}short", "line 1: the password is not hashed"),
        ("joe:{SHA}" + base64.b64encode(b"x" * 19).decode(), "line 1: the password is not hashed"),
        (f"joe:{HASH}:x", "line 1: the password is not hashed"),
        (f"joe:{HASH}\njoe:{HASH}", "line 2: the same user stands in line 1"),
    ],
)
def test_faulty_users_are_refused_by_line_and_not_repeated(text, reason):
    """A hash can be tried out by whoever sees it."""
    with pytest.raises(ValueError, match=r".") as refused:
        parse_passwords(text)

    assert reason in str(refused.value)
    assert not any(part in str(refused.value) for part in ("plain", "apr1", "secret", "0DPiKu"))


def test_public_keys_are_taken_without_what_is_not_public():
    """A set may hold keys of other kinds, and by mistake private ones."""
    (key,) = json.loads(jwks())["keys"]
    document = {
        "keys": [{"kty": "oct", "k": "c2VjcmV0"}, {**key, "d": "cHJpdmF0ZQ", "x5c": ["x"]}, 7]
    }

    found = json.loads(parse_jwks(json.dumps(document)))

    assert found == {"keys": [key]}


def number(size):
    """Return a number of so many bytes as a key holds it; it is odd."""
    return base64.urlsafe_b64encode(b"\xff" * size).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "EC", "crv": "P-256", "x": number(32), "y": number(31)},
        {"kty": "EC", "crv": "P-384", "x": number(48), "y": number(48), "alg": "ES384"},
        {"kty": "EC", "crv": "P-521", "x": number(66), "y": number(66), "alg": ""},
        {"kty": "OKP", "crv": "Ed25519", "x": number(32), "kid": "k"},
        {"kty": "OKP", "crv": "Ed25519", "x": number(32), "alg": "EdDSA"},
        {"kty": "RSA", "n": number(256), "e": "Aw", "alg": "PS256"},
    ],
)
def test_other_kinds_of_public_keys_are_taken(key):
    """Elliptic curves."""
    assert json.loads(parse_jwks(json.dumps({"keys": [key]})))["keys"] == [key]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1: it is not JSON"),
        ('{"keys":\n [}', "line 2: it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "expected"),
        ("7", "expected"),
        ("{}", "expected"),
        ('{"keys": {}}', "expected"),
        ('{"keys": []}', "at least one public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "at least one public key"),
        ('{"keys": [{"kty": "RSA", "n": "eA"}]}', "at least one public key"),
        ('{"keys": [{"kty": "RSA", "n": "!", "e": "AQAB"}]}', "at least one public key"),
        ('{"keys": [{"kty": "RSA", "n": 7, "e": "AQAB"}]}', "at least one public key"),
        ('{"keys": [{"kty": "RSA", "n": "eA", "e": "AQAB", "kid": 7}]}', "at least one public key"),
        ('{"keys": [{"kty": ["RSA"], "n": "eA", "e": "AQAB"}]}', "at least one public key"),
    ],
)
def test_set_without_a_public_key_is_refused(text, reason):
    """A symmetric key would let whoever can check tokens make them."""
    with pytest.raises(ValueError, match=r".") as refused:
        parse_jwks(text)

    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "EC", "crv": "secp256k1", "x": number(32), "y": number(32)},
        {"kty": "EC", "crv": "P-256", "x": number(33), "y": number(32)},
        {"kty": "EC", "crv": "P-256", "x": "A", "y": number(32)},
        {"kty": "EC", "crv": "P-256", "x": number(32), "y": number(32), "alg": "ES384"},
        {"kty": "OKP", "crv": "X25519", "x": number(32)},
        {"kty": "OKP", "crv": "Ed25519", "x": number(31)},
        {"kty": "OKP", "crv": "Ed25519", "x": number(32), "alg": "ES256"},
        {"kty": "RSA", "n": number(32), "e": "AQAB"},
        {"kty": "RSA", "n": number(256), "e": "BQ"},
        {"kty": "RSA", "n": number(255) + "A", "e": "AQAB"},
        {"kty": "RSA", "n": number(255) + "_g", "e": "AQAB"},
        {"kty": "RSA", "n": number(256), "e": "AQAB", "alg": "HS256"},
        {"kty": "RSA", "n": number(256), "e": "AQAB", "alg": "ES256"},
    ],
)
def test_key_that_envoy_would_not_take_is_none(key):
    """Alone it would lock everybody out; beside a good one it is left out."""
    (good,) = json.loads(jwks())["keys"]

    with pytest.raises(ValueError, match="at least one public key"):
        parse_jwks(json.dumps({"keys": [key]}))
    assert json.loads(parse_jwks(json.dumps({"keys": [key, good]}))) == {"keys": [good]}


@given(st.text())
def test_any_text_is_taken_or_refused(text):
    """Nothing else is raised."""
    for parse in (parse_api_keys, parse_passwords, parse_jwks):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)  # noqa: PT017
