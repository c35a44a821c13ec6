"""Files that say how clients prove who they are: text in, what Envoy is given out.

A text that cannot be used raises ``ValueError``, which says in which line and why, and never what stands
there: it may be a secret.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from extproc.xds.model import ApiKey

VISIBLE = re.compile(r"[!-~]+")
SHA1_BYTES = 20
SHA_MARK = "{SHA}"

PUBLIC_MEMBERS = frozenset({"kty", "kid", "alg", "use", "n", "e", "crv", "x", "y"})
"""What Envoy gets of a key. A private part, or a chain of certificates, is none of its business."""

NEEDED_MEMBERS: Mapping[str, frozenset[str]] = {
    "RSA": frozenset({"n", "e"}),
    "EC": frozenset({"crv", "x", "y"}),
    "OKP": frozenset({"crv", "x"}),
}
"""By the type of the key."""

RSA_BITS = range(512, 8192 + 1)
RSA_EXPONENTS = frozenset({3, 65537})
CURVES = {"P-256": ("ES256", 32), "P-384": ("ES384", 48), "P-521": ("ES512", 66)}
"""The algorithm that goes with each, and how many bytes a coordinate has at most."""

ED25519_BYTES = 32


def parse_api_keys(text: str) -> tuple[ApiKey, ...]:
    """Read NAME KEY in each line. A name may stand in several lines: a client with an old and a new key."""
    found: dict[str, ApiKey] = {}
    lines: dict[str, int] = {}
    for number, line in _lines(text):
        parts = line.split()
        if len(parts) != 2:
            raise ValueError(f"line {number}: expected NAME KEY, got {len(parts)} words")
        name, key = parts
        if not VISIBLE.fullmatch(name) or not VISIBLE.fullmatch(key):
            raise ValueError(f"line {number}: expected visible ASCII characters only")
        if key in found:
            raise ValueError(f"line {number}: the same key stands in line {lines[key]}")
        found[key] = ApiKey(name, key)
        lines[key] = number
    if not found:
        raise ValueError("there is no key in it")
    return tuple(found.values())


def parse_passwords(text: str) -> str:
    """Read NAME:{SHA}HASH in each line, and return it without remarks."""
    users: dict[str, int] = {}
    kept = []
    for number, line in _lines(text):
        name, separator, password = line.partition(":")
        if not separator or not VISIBLE.fullmatch(name):
            raise ValueError(f"line {number}: expected NAME:PASSWORD as `htpasswd -s` writes it")
        if not _is_sha(password):
            raise ValueError(
                f"line {number}: the password is not hashed by SHA-1, which is what Envoy takes; write"
                " it with `htpasswd -s`"
            )
        if name in users:
            raise ValueError(f"line {number}: the same user stands in line {users[name]}")
        users[name] = number
        kept.append(f"{name}:{password}\n")
    if not kept:
        raise ValueError("there is no user in it")
    return "".join(kept)


def parse_jwks(text: str) -> str:
    """Read a set of public keys (JWKS), and return those that can be used, without what is not public."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{line}it is not JSON") from None
    keys = document.get("keys") if isinstance(document, dict) else None
    usable = [
        {name: key[name] for name in sorted(PUBLIC_MEMBERS & key.keys())}
        for key in (keys if isinstance(keys, list) else ())
        if isinstance(key, dict) and _is_public_key(key)
    ]
    if not usable:
        raise ValueError(
            'expected {"keys": [...]} with at least one public key (RSA, EC or OKP) that can be used'
        )
    return json.dumps({"keys": usable})


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that say something, by number."""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def _is_sha(password: str) -> bool:
    if not password.startswith(SHA_MARK):
        return False
    try:
        digest = base64.b64decode(password.removeprefix(SHA_MARK), validate=True)
    except (ValueError, binascii.Error):
        return False
    return len(digest) == SHA1_BYTES


def _is_public_key(key: Mapping[str, Any]) -> bool:
    needed = NEEDED_MEMBERS.get(str(key.get("kty")), frozenset())
    texts = [key.get(name) for name in needed]
    optional = [key[name] for name in ("kid", "alg", "use") if name in key]
    if not needed or not all(isinstance(text, str) and text for text in texts):
        return False
    numbers = {name: _unbase64url(key[name]) for name in needed - {"crv"}}
    return all(isinstance(text, str) for text in optional) and _is_for_envoy(key, numbers)


def _is_for_envoy(key: Mapping[str, Any], numbers: Mapping[str, bytes]) -> bool:
    """Tell whether Envoy takes the key, as far as that shows without calculating on a curve."""
    alg = key.get("alg", "")
    if key["kty"] == "RSA":
        modulus, exponent = (int.from_bytes(numbers[name]) for name in ("n", "e"))
        fits = modulus.bit_length() in RSA_BITS and modulus % 2 == 1
        return fits and exponent in RSA_EXPONENTS and alg[:2] in ("", "RS", "PS")
    if key["kty"] == "EC":
        own_alg, size = CURVES.get(key["crv"], ("", 0))
        return alg in ("", own_alg) and all(1 <= len(data) <= size for data in numbers.values())
    is_known = key["crv"] == "Ed25519" and alg in ("", "EdDSA")
    return is_known and len(numbers["x"]) == ED25519_BYTES


def _unbase64url(text: str) -> bytes:
    """Return what *text* stands for, nothing when it is none."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        return b""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return b""
