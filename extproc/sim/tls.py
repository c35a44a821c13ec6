"""The certificate of a worker that serves https."""

import ssl


def server_context(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """Return the context for a PEM certificate; its key may be in the same file.

    ValueError when the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:  # SSLError is one
        reason = error.strerror or error
        raise ValueError(f"cannot use the certificate {certfile!r}: {reason}") from error
    return context
