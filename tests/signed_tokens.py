"""Tokens (JWT) that an issuer of the tests' own signs with RS256."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from typing import Any

ISSUER = "https://idp.example"

_MODULUS = int(
    "a32e0386f9f4baad1940c226a4b9bfeaf1974f7304a403866fea457b14802208475f6d15e271d362e8f8de6650"
    "daba2a2669af8d7afc57d509759bdce775de57d639ec04907757e418c57e334e9f58faee4946b701564e803a5f"
    "db4bab52c392267354921185e3a982a867be3e0eff026f8bf5039f396e3411354b146817164e2a83b4cbb2cfbc"
    "ec83adfc156b918f5a422651da62aec768b095d0fdd412b7b635e5fc3baee7ec64edc8148bbf7b0445f93122ec"
    "89412f44ad2480d77745052dbea7d29ab0484adaae539a8766350573c03c7fff1606b930ba2c319ecb3d96d713"
    "d4d10617129cf1c5c3bc09f1439c85025867787db917b8923e2b7d29fb5ea9",
    16,
)
_PRIVATE = int(
    "1153e7497bbcf65ebfbdfdefeb119374e0232c6b5f0c88984bc5918bbc954fa7d7e664f7cc34409971fa4d6989"
    "7ff48159d362b2302360334dde18873867ee8c9ec1c75383c0bc8b4aeb1bd7d86b38e06a91cae9cf8149f4395e"
    "a8f38bd58dd174f64dbe761064e8c0e85f9dd6cab25f2097b8d4a1e1901784d5472bfb52aa4a46a44c540a7112"
    "63dce4df0d0fa27b66e98ce2463244517824f18d0facbcfd31af71baf3761909ac213480761bcab766e02b206d"
    "1c5cca417755604a31571a96d8bd6713545756c84b6c908c214a3ddfac15ccf3ffb57a7468e450d6df39941ccd"
    "8754288b67e8bedbcce710e2eb6d633355f0bb8628adedbb28b0e1c3a64be1",
    16,
)
_EXPONENT = 65537
_BYTES = 256
_SHA256 = bytes.fromhex("3031300d060960864801650304020105000420")


def jwks(kid: str = "one", **more: Any) -> str:
    """Return the issuer's public keys."""
    key = {
        "kty": "RSA",
        "alg": "RS256",
        "use": "sig",
        "kid": kid,
        "n": _encode(_MODULUS.to_bytes(_BYTES)),
        "e": _encode(_EXPONENT.to_bytes(3)),
        **more,
    }
    return json.dumps({"keys": [key]})


def token(*, kid: str = "one", alg: str = "RS256", **claims: Any) -> str:
    """Return a token that is good for a minute, with *claims* put in; None takes a claim out."""
    all_claims = {"iss": ISSUER, "sub": "ann", "aud": "llm", "exp": int(time.time()) + 60, **claims}
    payload = {name: value for name, value in all_claims.items() if value is not None}
    header = {"alg": alg, "typ": "JWT", "kid": kid}
    signed = f"{_encode(json.dumps(header).encode())}.{_encode(json.dumps(payload).encode())}"
    return f"{signed}.{_encode(_sign(signed.encode()))}"


def _sign(data: bytes) -> bytes:
    """Sign as PKCS 1 says (version 1.5)."""
    digest = _SHA256 + hashlib.sha256(data).digest()
    padded = b"\x00\x01" + b"\xff" * (_BYTES - len(digest) - 3) + b"\x00" + digest
    return pow(int.from_bytes(padded), _PRIVATE, _MODULUS).to_bytes(_BYTES)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
