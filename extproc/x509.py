"""As much of X.509 as it takes to tell what kind of key a certificate is for.

Envoy takes fewer kinds than OpenSSL, and says so only when it gets the certificate.
"""

from __future__ import annotations

MIN_RSA_BITS = 2048
_VERSION, _OID = 0xA0, 0x06
_RSA = bytes.fromhex("2a864886f70d010101")
_EC = bytes.fromhex("2a8648ce3d0201")
_CURVES = frozenset(
    map(bytes.fromhex, ("2a8648ce3d030107", "2b81040022", "2b81040023"))  # P-256, P-384, P-521
)


def unusable_key(certificate: bytes) -> str:
    """Return why Envoy would not serve with *certificate* (DER), "" when it would.

    ``ValueError`` when it is no certificate.
    """
    try:
        algorithm, parameters, key = _public_key(certificate)
    except IndexError as error:
        raise ValueError("it ends too early") from error
    if algorithm == _RSA:
        bits = int.from_bytes(_modulus(key)).bit_length()
        if bits < MIN_RSA_BITS:
            return f"an RSA key of {bits} bits; at least {MIN_RSA_BITS} are needed"
        return ""
    if algorithm == _EC:
        if parameters not in _CURVES:
            return "an EC key of a curve that is not supported; use P-256, P-384 or P-521"
        return ""
    return "a kind of key that is not supported; use RSA, or EC on P-256, P-384 or P-521"


def _public_key(certificate: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the algorithm's OID, its parameter if that is one, and the bits of the public key."""
    _, outer, _ = _element(certificate)
    _, fields, _ = _element(outer)
    tag, _, rest = _element(fields)
    if tag != _VERSION:
        rest = fields
    for _ in range(5):  # serial number, signature, issuer, validity, subject
        _, _, rest = _element(rest)
    _, info, _ = _element(rest)
    _, algorithm, bits = _element(info)
    _, oid, parameters = _element(algorithm)
    named = b""
    if parameters:
        tag, value, _ = _element(parameters)
        named = value if tag == _OID else b""
    _, key, _ = _element(bits)
    return oid, named, key[1:]  # the first byte tells how many bits are unused


def _modulus(key: bytes) -> bytes:
    _, numbers, _ = _element(key)
    _, modulus, _ = _element(numbers)
    return modulus


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Split *data* into tag and value of its first element, and the rest."""
    length, start = data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start])
    if len(data) < start + length:
        raise IndexError
    return data[0], data[start : start + length], data[start + length :]
