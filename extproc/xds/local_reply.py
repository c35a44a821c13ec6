"""Envoy's own answers, worded as OpenAI errors.

Envoy answers some requests itself: no worker could be reached, the body is too large, the service is
away. Its texts name addresses and internals; these do not. Answers that this service makes carry
``router_`` details and pass as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLogFilter,
    AndFilter,
    ComparisonFilter,
    ComparisonFilterOp,
    ExtensionFilter,
    HeaderFilter,
    OrFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    RuntimeUInt32,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.errors import Refusal, error_body, refusal_message
from extproc.xds.model import ADMIN_CLUSTER, PROBE_PATHS, UNROUTED_CLUSTER

SERVICE_AWAY = json.dumps(
    {"status": "ready", "reason": "the service is away; envoy balances by itself"}
)
OWN_DETAILS_PREFIX = "router_"


def build_local_replies(*, fail_closed: bool) -> LocalReplyConfig:
    """Return the mappers; the first that matches words the answer."""
    return LocalReplyConfig(
        mappers=[
            *_probe_replies(fail_closed=fail_closed),
            _mapper(
                _status(413),
                413,
                Refusal.PAYLOAD_TOO_LARGE,
                refusal_message(Refusal.PAYLOAD_TOO_LARGE),
            ),
            _mapper(
                _status(431),
                431,
                "request_header_fields_too_large",
                "The request headers are larger than this router accepts.",
            ),
            _mapper(
                _either(
                    _details("details.startsWith('ext_proc_error')"),
                    _matching(f"xds.cluster_name == '{UNROUTED_CLUSTER}'"),
                ),
                503,
                "router_unavailable",
                "The router cannot choose a worker at the moment. Retry later.",
            ),
            _mapper(
                _both(_matching(f"xds.cluster_name == '{ADMIN_CLUSTER}'"), _server_error()),
                503,
                "router_unavailable",
                "The router's service is away. Retry later.",
            ),
            _mapper(
                _flags("UH", "NC", "NFCF"),
                503,
                Refusal.NO_WORKER,
                refusal_message(Refusal.NO_WORKER),
            ),
            _mapper(
                _flags("UT", "SI", "DT", "UMSDR"),
                504,
                "upstream_timeout",
                "The worker did not answer in time.",
            ),
            _mapper(
                _flags("UF", "UC", "UR", "LR", "URX", "UO", "UPE", "DF"),
                503,
                "worker_connection_failed",
                "The connection to the worker failed before it answered. Retry later.",
            ),
            _mapper(
                _either(_flags("DPE", "IH"), _both(_status(400), _not_ours())),
                400,
                "bad_request",
                "The request is not valid HTTP.",
            ),
            _mapper(
                _both(_server_error(), _not_ours()),
                500,
                "request_failed",
                "The router could not pass on this request.",
            ),
            _mapper(
                _not_ours(),
                400,
                "request_failed",
                "The router does not take this request.",
            ),
        ]
    )


def _probe_replies(*, fail_closed: bool) -> list[ResponseMapper]:
    """Return how a probe is answered that the service does not answer.

    When failing open Envoy serves without it, and a load balancer must not take it out.
    """
    away = [_away(path) for path in PROBE_PATHS]
    if fail_closed:
        text = "The router's service is away."
        return [_mapper(condition, 503, "router_unavailable", text) for condition in away]
    return [
        ResponseMapper(
            filter=condition,
            status_code=200,
            body_format_override=SubstitutionFormatString(
                text_format_source=DataSource(inline_string=SERVICE_AWAY),
                content_type="application/json",
            ),
        )
        for condition in away
    ]


def _away(path: str) -> AccessLogFilter:
    probe = HeaderMatcher(name=":path", string_match=StringMatcher(exact=path))
    return _both(
        AccessLogFilter(header_filter=HeaderFilter(header=probe)),
        _flags("UF", "UC", "UR", "LR", "URX", "UO", "UPE", "UT", "UH"),
    )


def _mapper(condition: AccessLogFilter, status: int, code: str, message: str) -> ResponseMapper:
    body = error_body(status, code, message).replace("%", "%%")
    return ResponseMapper(
        filter=condition,
        body_format_override=SubstitutionFormatString(
            text_format_source=DataSource(inline_string=body), content_type="application/json"
        ),
    )


def _status(code: int, op: ComparisonFilterOp = ComparisonFilterOp.EQ) -> AccessLogFilter:
    value = RuntimeUInt32(default_value=code, runtime_key=f"local_reply.{code}")
    return AccessLogFilter(
        status_code_filter=StatusCodeFilter(comparison=ComparisonFilter(op=op, value=value))
    )


def _server_error() -> AccessLogFilter:
    return _status(500, ComparisonFilterOp.GE)


def _not_ours() -> AccessLogFilter:
    return _details(f"!details.startsWith('{OWN_DETAILS_PREFIX}')")


def _both(first: AccessLogFilter, second: AccessLogFilter) -> AccessLogFilter:
    return AccessLogFilter(and_filter=AndFilter(filters=[first, second]))


def _flags(*flags: str) -> AccessLogFilter:
    return AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=_list(flags)))


def _list(flags: Sequence[str]) -> list[str]:
    return list(flags)


def _either(first: AccessLogFilter, second: AccessLogFilter) -> AccessLogFilter:
    return AccessLogFilter(or_filter=OrFilter(filters=[first, second]))


def _details(expression: str) -> AccessLogFilter:
    return _matching(expression.replace("details", "response.code_details"))


def _matching(text: str) -> AccessLogFilter:
    return AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=Any.pack(ExpressionFilter(expression=text)),
        )
    )
