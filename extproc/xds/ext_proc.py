"""The ext_proc filter: how Envoy asks this service."""

from __future__ import annotations

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import GrpcService, GrpcServiceEnvoyGrpc
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExternalProcessorRouteCacheAction,
    ExtProcPerRoute,
    HeaderForwardingRules,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import (
    ListStringMatcher,
    RegexMatcher,
    StringMatcher,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from extproc.ext_proc_answers import (
    MAX_WAIT_S,
    METADATA_NAMESPACE,
    RANK_HEADER,
    RANK_NAMESPACE,
    REQUEST_ID_HEADER,
    RETRY_AFTER_HEADER,
    SUBSET_NAMESPACE,
)
from extproc.xds.bootstrap import EXTPROC_CLUSTER
from extproc.xds.model import CREDENTIAL_HEADERS, SHOWN_CREDENTIALS, EnvoyModel
from extproc.xds.wire import seconds

FILTER_NAME = "envoy.filters.http.ext_proc"

MUTABLE_HEADERS = (
    # CLUSTER_HEADER, ENDPOINT_KEY, MAX_RETRIES_HEADER; Envoy takes no client's own
    "x-(router|gateway|envoy-max)-[a-z-]+",
    REQUEST_ID_HEADER,
    RANK_HEADER,
    "content-(type|length)",  # of our own answers, and of a body in which a model's alias was replaced
    RETRY_AFTER_HEADER,
)
"""What the service may set, as expressions. Envoy refuses one whose compiled program has more than 100 parts,
about one for each character."""

_SEND = ProcessingModeHeaderSendMode.SEND
_SKIP = ProcessingModeHeaderSendMode.SKIP


def build_ext_proc(model: EnvoyModel, *, read_body: bool = True) -> HttpFilter:
    """Return the filter; without *read_body* (protocol upgrades) it hands over headers only."""
    shown = frozenset[str]() if model.prefill_address is None else SHOWN_CREDENTIALS
    hidden = [name for name in CREDENTIAL_HEADERS if name not in shown]
    config = ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER),
            timeout=seconds(0),  # the stream lives as long as the request
        ),
        # Also when failing closed: an open stream must not end because the service did. Requests that
        # carry no pick then end in a cluster without endpoints.
        failure_mode_allow=True,
        processing_mode=_processing_mode(model, read_body=read_body),
        message_timeout=seconds(model.decision_timeout_s),
        max_message_timeout=seconds(MAX_WAIT_S),
        allow_mode_override=not model.full_duplex,
        route_cache_action=ExternalProcessorRouteCacheAction.DEFAULT,
        forward_rules=HeaderForwardingRules(
            disallowed_headers=ListStringMatcher(
                patterns=[StringMatcher(exact=name) for name in hidden]
            )
        ),
        mutation_rules=HeaderMutationRules(
            disallow_all=True,
            allow_expression=RegexMatcher(regex=f"^({'|'.join(MUTABLE_HEADERS)})$"),
        ),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[SUBSET_NAMESPACE]),
            receiving_namespaces=MetadataOptionsMetadataNamespaces(
                untyped=[METADATA_NAMESPACE, RANK_NAMESPACE]
            ),
        ),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )
    return HttpFilter(name=FILTER_NAME, typed_config=Any.pack(config))


def build_disabled() -> dict[str, Any]:
    """Return the per-route configuration that switches the filter off."""
    return {FILTER_NAME: Any.pack(ExtProcPerRoute(disabled=True))}


def _processing_mode(model: EnvoyModel, *, read_body: bool) -> ProcessingMode:
    body = ProcessingModeBodySendMode.NONE
    request_trailers = _SKIP
    if read_body and model.full_duplex:
        body = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
        request_trailers = _SEND  # Envoy demands it in this mode
    elif read_body:
        body = ProcessingModeBodySendMode.BUFFERED
    return ProcessingMode(
        request_header_mode=_SEND,
        request_body_mode=body,
        request_trailer_mode=request_trailers,
        response_header_mode=_SKIP,
        response_body_mode=ProcessingModeBodySendMode.NONE,
        # Keeps the stream open until the HTTP stream ends: its end releases the lease. Costs no
        # message unless the response really has trailers.
        response_trailer_mode=_SEND,
    )
