"""Options of who may ask, what browsers and workers are told, and TLS for clients; a part of ``config.Config``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from extproc.resilience_options import Duration, ResilienceOptions

REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")


class SecurityOptions(ResilienceOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who gets in."""

    api_key: Annotated[
        str,
        Meta(
            description="Key that clients must show as Authorization: Bearer KEY, or in x-api-key. Better"
            " set VLLM_EXTPROC_API_KEY: a process list shows flags."
        ),
    ] = ""
    api_keys_file: Annotated[
        str,
        Meta(
            description="File with the keys of clients, NAME KEY in each line; read again when it changes."
        ),
    ] = ""
    htpasswd_file: Annotated[
        str,
        Meta(
            description="File with the users of clients that show a password, as `htpasswd -s` writes it;"
            " read again when it changes."
        ),
    ] = ""
    jwt_issuer: Annotated[
        str, Meta(description="Issuer (iss) of the tokens (JWT) that clients must show.")
    ] = ""
    jwt_jwks: Annotated[
        str,
        Meta(
            description="File or URL with the issuer's public keys (JWKS); read again when the file changes,"
            " or every five minutes."
        ),
    ] = ""
    jwt_audiences: Annotated[
        tuple[str, ...],
        Meta(description="Audiences (aud) of which a token must name one. None: any token does."),
    ] = ()
    api_key_validation_urls: Annotated[
        tuple[str, ...],
        Meta(
            description="URLs that are asked with the client's bearer token; if any answers 200 the client"
            " gets in. Also taken from API_KEY_VALIDATION_URLS, separated by commas."
        ),
    ] = ()
    api_key_validation_cache_secs: Annotated[
        Duration, Meta(description="Seconds for which an answer of the validation URLs counts.")
    ] = 60
    api_key_validation_timeout_secs: Annotated[
        Annotated[float, Meta(gt=0, le=60)],
        Meta(description="Seconds that a validation URL may take."),
    ] = 5
    keep_client_authorization: Annotated[
        bool,
        Meta(
            description="Hand the client's Authorization to workers where --worker-api-key would replace it"
            " or the router has checked it."
        ),
    ] = False
    cors_allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins of web pages that may use the router from a browser, for example"
            " https://chat.example; * allows all. None: no page may."
        ),
    ] = ()
    request_id_headers: Annotated[
        tuple[str, ...],
        Meta(
            description="Headers of which the first that a client sent becomes the request's id; without one"
            " an id is made. Workers and clients get it as x-request-id."
        ),
    ] = REQUEST_ID_HEADERS
    tls_cert: Annotated[
        str,
        Meta(
            description="File with the certificate chain (PEM) with which clients are served over HTTPS;"
            " read again when it changes."
        ),
    ] = ""
    tls_key: Annotated[str, Meta(description="File with the private key (PEM) of --tls-cert.")] = ""
    tls_client_ca: Annotated[
        str,
        Meta(
            description="File with the certificates (PEM) that vouch for clients, who then must show one"
            " (mTLS)."
        ),
    ] = ""
