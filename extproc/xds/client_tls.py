"""TLS towards clients.

The listener names its certificate and Envoy gets it by SDS, so that a new one changes no listener: connections
that are open go on with the old one, new ones get the new one.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import DataSource, TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    DownstreamTlsContext,
    SdsSecretConfig,
    Secret,
    TlsCertificate,
    TlsParameters,
    TlsParametersTlsProtocol,
)
from envoy_data_plane.google.protobuf import Any

from extproc.xds.model import Certificates, ClientTls
from extproc.xds.wire import from_ads

CERTIFICATE_NAME = "client_tls_certificate"
CA_NAME = "client_tls_ca"
ALPN = ("h2", "http/1.1")


def build_transport_socket(tls: ClientTls, *, static: bool) -> TransportSocket:
    """Return what the listener speaks to clients; *static*: Envoy reads the files, instead of SDS."""
    common = CommonTlsContext(
        tls_params=TlsParameters(tls_minimum_protocol_version=TlsParametersTlsProtocol.TLSv1_2),
        alpn_protocols=list(ALPN),
    )
    if static:
        common.tls_certificates = [
            _certificate(DataSource(filename=tls.cert_file), DataSource(filename=tls.key_file))
        ]
        if tls.client_ca_file:
            common.validation_context = _validation(DataSource(filename=tls.client_ca_file))
    else:
        common.tls_certificate_sds_secret_configs = [_by_sds(CERTIFICATE_NAME)]
        if tls.client_ca_file:
            common.validation_context_sds_secret_config = _by_sds(CA_NAME)
    context = DownstreamTlsContext(
        common_tls_context=common, require_client_certificate=bool(tls.client_ca_file)
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def build_client_tls_secrets(certificates: Certificates | None) -> list[Secret]:
    """Return the secrets that the listener's transport socket names."""
    if certificates is None:
        return []
    certificate = _certificate(
        DataSource(inline_string=certificates.cert), DataSource(inline_string=certificates.key)
    )
    secrets = [Secret(name=CERTIFICATE_NAME, tls_certificate=certificate)]
    if certificates.client_ca:
        validation = _validation(DataSource(inline_string=certificates.client_ca))
        secrets.append(Secret(name=CA_NAME, validation_context=validation))
    return secrets


def _certificate(chain: DataSource, key: DataSource) -> TlsCertificate:
    return TlsCertificate(certificate_chain=chain, private_key=key)


def _validation(ca: DataSource) -> CertificateValidationContext:
    return CertificateValidationContext(trusted_ca=ca)


def _by_sds(name: str) -> SdsSecretConfig:
    return SdsSecretConfig(name=name, sds_config=from_ads())
