"""Envoy's own answers, worded as OpenAI errors.

Envoy answers some requests itself: no worker could be reached, the body is too large, the service is
away. Its texts name addresses and internals; these do not. Answers that this service makes carry
``router_`` details and pass as they are.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

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
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
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
from extproc.xds.header_hygiene import FRESH_ID, REQUEST_ID_HEADER
from extproc.xds.locked_out import DETAILS as LOCKED_OUT
from extproc.xds.model import ADMIN_CLUSTER, PROBE_PATHS, UNROUTED_CLUSTER

SERVICE_AWAY = json.dumps(
    {"status": "ready", "reason": "the service is away; envoy balances by itself"}
)
OWN_DETAILS_PREFIX = "router_"

_Action = HeaderValueOptionHeaderAppendAction


@dataclasses.dataclass(frozen=True, slots=True)
class EnvoyError:
    """How one kind of Envoy's own answers is worded."""

    status: int
    """Of the answer, as Envoy gives it; for ``request_failed`` one of several."""

    code: str
    message: str
    when: AccessLogFilter
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replaces_status: bool = False
    """Whether Envoy gives it another status."""


def envoy_errors() -> tuple[EnvoyError, ...]:
    """Return all kinds; of those that match an answer, the first words it. ``docs/errors.md`` lists them."""
    return (*_errors_of_requests(), *_errors_of_access(), *_errors_of_workers())


def _errors_of_requests() -> Iterator[EnvoyError]:
    yield EnvoyError(
        413,
        Refusal.PAYLOAD_TOO_LARGE,
        refusal_message(Refusal.PAYLOAD_TOO_LARGE),
        _both(_status(413), _not_ours()),
    )
    yield EnvoyError(
        431,
        "request_header_fields_too_large",
        "The request headers are larger than this router accepts.",
        # With the headers that the router adds they are more than Envoy takes: 503, says Envoy.
        _either(_status(431), _details("details == 'header_mutation_result_exceeds_limit'")),
        replaces_status=True,
    )
    yield EnvoyError(
        408,
        "request_timeout",
        "The request did not arrive in time.",
        _both(_status(408), _not_ours()),
    )
    yield EnvoyError(
        426,
        "http_version_not_supported",
        "This router speaks HTTP/1.1 and HTTP/2.",
        _status(426),
    )
    yield EnvoyError(
        501,
        "transfer_encoding_not_supported",
        "This router takes no transfer encoding but chunked.",
        _both(_status(501), _not_ours()),
    )
    yield EnvoyError(
        403,
        "upgrade_not_supported",
        "This router lets connections be upgraded to WebSocket and to nothing else.",
        _details("details == 'upgrade_failed'"),
    )


def _errors_of_access() -> Iterator[EnvoyError]:
    yield EnvoyError(
        503,
        "router_unavailable",
        "The router's key for workers is not there yet. Retry later.",
        _details("details == 'failed_to_inject_credential'"),
        replaces_status=True,
    )
    yield EnvoyError(
        401,
        "invalid_api_key",
        "The name and password of a user are missing or wrong.",
        _both(_status(401), _details("details.endsWith('basic_auth')")),
        {"www-authenticate": 'Basic realm="vllm-extproc"'},
    )
    yield EnvoyError(
        401,
        "invalid_api_key",
        "The API key or token is missing, wrong or expired. Send it as Authorization: Bearer KEY.",
        _both(_status(401), _not_ours()),
        {"www-authenticate": "Bearer"},
    )
    yield EnvoyError(
        403,
        "permission_denied",
        "The token was not issued for this router.",
        _both(_status(403), _not_ours()),
        {"www-authenticate": "Bearer"},
    )
    yield EnvoyError(
        503,
        "auth_unavailable",
        "The router cannot check API keys or tokens at the moment. Retry later.",
        _details(f"(details.startsWith('ext_authz') || details == '{LOCKED_OUT}')"),
    )
    yield EnvoyError(
        429,
        "rate_limit_exceeded",
        "Too many requests in this time. Retry after the seconds that the header retry-after names.",
        _both(_status(429), _not_ours()),
    )
    yield EnvoyError(
        503,
        "router_overloaded",
        "The router has no memory left for more requests. Retry later.",
        _details("details.startsWith('overload')"),
        {"retry-after": "1"},
        replaces_status=True,  # Envoy's HTTP/1.1 codec says 500
    )


def _errors_of_workers() -> Iterator[EnvoyError]:
    yield EnvoyError(
        503,
        "router_unavailable",
        "The router cannot choose a worker at the moment. Retry later.",
        _either(
            _details("details.startsWith('ext_proc_error')"),
            # Refusals of our own are about requests that were on their way there, too.
            _both(_matching(f"xds.cluster_name == '{UNROUTED_CLUSTER}'"), _not_ours()),
        ),
    )
    yield EnvoyError(
        503,
        "router_unavailable",
        "The router's service is away. Retry later.",
        _both(_matching(f"xds.cluster_name == '{ADMIN_CLUSTER}'"), _server_error()),
    )
    yield EnvoyError(
        503, Refusal.NO_WORKER, refusal_message(Refusal.NO_WORKER), _flags("UH", "NC", "NFCF")
    )
    yield EnvoyError(
        504,
        "upstream_timeout",
        "The worker did not answer in time.",
        _flags("UT", "SI", "DT", "UMSDR"),
    )
    yield EnvoyError(
        502,
        "worker_answer_invalid",
        "The worker's answer is not valid HTTP.",
        _both(_status(502), _flags("UPE")),
    )
    yield EnvoyError(
        502,
        "worker_answer_invalid",
        "The worker switched protocols, which the request had not asked for.",
        _details("details.startsWith('filter_removed_required_response_headers')"),
    )
    yield EnvoyError(
        503,
        "worker_connection_failed",
        "The connection to the worker failed before it answered. Retry later.",
        _flags("UF", "UC", "UR", "LR", "URX", "UO", "UPE", "DF"),
    )
    yield EnvoyError(404, "not_found", "There is nothing at this path.", _flags("NR"))
    yield EnvoyError(
        400, "bad_request", "The request is not valid HTTP.", _both(_status(400), _not_ours())
    )
    yield EnvoyError(
        500,
        "request_failed",
        "The router could not pass on this request.",
        _both(_server_error(), _not_ours()),
    )
    yield EnvoyError(400, "request_failed", "The router does not take this request.", _not_ours())


def build_local_replies(*, fail_closed: bool) -> LocalReplyConfig:
    """Return the mappers; the first that matches words the answer."""
    return LocalReplyConfig(
        mappers=[
            *_probe_replies(fail_closed=fail_closed),
            *(_mapper(error) for error in envoy_errors()),
        ]
    )


def _probe_replies(*, fail_closed: bool) -> list[ResponseMapper]:
    """Return how a probe is answered that the service does not answer.

    When failing open Envoy serves without it, and a load balancer must not take it out.
    """
    away = [_away(path) for path in PROBE_PATHS]
    if fail_closed:
        text = "The router's service is away."
        return [_mapper(EnvoyError(503, "router_unavailable", text, when)) for when in away]
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


def _mapper(error: EnvoyError) -> ResponseMapper:
    body = error_body(error.status, error.code, error.message).replace("%", "%%")
    mapper = ResponseMapper(
        filter=error.when,
        body_format_override=SubstitutionFormatString(
            text_format_source=DataSource(inline_string=body), content_type="application/json"
        ),
        headers_to_add=[
            _header(name, value, _Action.OVERWRITE_IF_EXISTS_OR_ADD)
            for name, value in error.headers.items()
        ]
        # What is no HTTP passes no filter that would give its answer an id.
        + [_header(REQUEST_ID_HEADER, FRESH_ID, _Action.ADD_IF_ABSENT)],
    )
    if error.replaces_status:
        mapper.status_code = error.status
    return mapper


def _header(
    name: str, value: str, action: HeaderValueOptionHeaderAppendAction
) -> HeaderValueOption:
    return HeaderValueOption(header=HeaderValue(key=name, value=value), append_action=action)


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
