"""TLS towards https workers.

Which transport socket an endpoint takes is in its metadata (``endpoint.TLS_KEY``). A worker with a host
name is asked for that name, and its certificate must carry it; one without is known by its address.
"""

from __future__ import annotations

from collections.abc import Mapping

from envoy_data_plane.envoy.config.cluster.v3 import ClusterTransportSocketMatch
from envoy_data_plane.envoy.config.core.v3 import DataSource, TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.raw_buffer.v3 import RawBuffer
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CertificateValidationContextTrustChainVerification,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any, Struct, Value

from extproc.clusters import ClusterView
from extproc.xds.endpoint import BY_NAME, HTTPS, HTTPS_KEY, TLS_KEY
from extproc.xds.model import WorkerTls

NO_HASH = "00" * 32
"""The SHA-256 of no certificate."""


def tls_addresses(cluster: ClusterView) -> tuple[str, ...]:
    """Return the addresses that https workers of *cluster* are known by, for want of a name; sorted."""
    return tuple(sorted({view.name for view in cluster.endpoints if view.tls and view.name_is_ip}))


def build_socket_matches(
    tls: WorkerTls, addresses: tuple[str, ...]
) -> list[ClusterTransportSocketMatch]:
    """Return TLS for https workers by name and at *addresses*, and plain TCP for all others.

    All but the *addresses* is in every cluster from the start: a cluster that changes is made anew, and
    forgets whom it has ejected. An https worker that none of it fits (its match is on the way, or Envoy
    refused it) gets TLS that trusts nobody, never plain TCP.
    """
    by_name = (BY_NAME,) if tls.insecure or tls.ca_file else ()
    matches = [_match(f"tls {k}", {TLS_KEY: k}, _context(tls, k)) for k in (*by_name, *addresses)]
    matches.append(_match("tls nobody", {HTTPS_KEY: HTTPS}, _trusting_nobody()))
    plain = TransportSocket(
        name="envoy.transport_sockets.raw_buffer", typed_config=Any.pack(RawBuffer())
    )
    matches.append(
        ClusterTransportSocketMatch(name="plain", match=Struct(), transport_socket=plain)
    )
    return matches


def _match(
    name: str, wanted: Mapping[str, str], context: UpstreamTlsContext
) -> ClusterTransportSocketMatch:
    return ClusterTransportSocketMatch(
        name=name,
        match=Struct(fields={key: Value(string_value=value) for key, value in wanted.items()}),
        transport_socket=TransportSocket(
            name="envoy.transport_sockets.tls", typed_config=Any.pack(context)
        ),
    )


def _trusting_nobody() -> UpstreamTlsContext:
    validation = CertificateValidationContext(verify_certificate_hash=[NO_HASH])
    return UpstreamTlsContext(common_tls_context=CommonTlsContext(validation_context=validation))


def _context(tls: WorkerTls, kind: str) -> UpstreamTlsContext:
    by_name = kind == BY_NAME
    validation = CertificateValidationContext()
    if tls.insecure:
        validation.trust_chain_verification = (
            CertificateValidationContextTrustChainVerification.ACCEPT_UNTRUSTED
        )
    else:
        validation.trusted_ca = DataSource(filename=tls.ca_file)
    if not by_name and not tls.insecure:
        validation.match_typed_subject_alt_names = [
            SubjectAltNameMatcher(
                san_type=SubjectAltNameMatcherSanType.IP_ADDRESS, matcher=StringMatcher(exact=kind)
            )
        ]
    return UpstreamTlsContext(
        auto_host_sni=by_name,
        auto_sni_san_validation=by_name and not tls.insecure,
        common_tls_context=CommonTlsContext(validation_context=validation),
    )
