"""Outlier detection of a cluster of workers: whom Envoy ejects for its answers, and for how long.

The service has a circuit breaker of its own for each worker, since the balancing by metadata ignores
ejections; see ``circuit``. What Envoy ejects is left out by its own balancing, which serves requests without
a pick and retries beyond the pick's list. Its verdicts outlive the service.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.cluster.v3 import OutlierDetection
from envoy_data_plane.envoy.config.common.matcher.v3 import (
    HttpHeadersMatch,
    MatchPredicate,
)
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from extproc.xds.model import Breaker
from extproc.xds.wire import seconds

OUTLIER_INTERVAL_S = 1.0
"""How often Envoy looks whether an ejection is over."""


def build_outlier_detection(breaker: Breaker) -> OutlierDetection | None:
    """Return when Envoy ejects a worker: for errors in a row, never for being slower than others.

    None: it ejects nobody.
    """
    if not breaker.failures:
        return None
    return OutlierDetection(
        consecutive_5xx=breaker.failures,
        consecutive_gateway_failure=breaker.failures,
        enforcing_consecutive_gateway_failure=100,
        split_external_local_origin_errors=True,
        # To Envoy a WebSocket that the worker closes is a failed connection too: three that end one after the
        # other would take a sound worker out. The service tells them apart, and counts the others.
        enforcing_consecutive_local_origin_failure=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
        interval=seconds(OUTLIER_INTERVAL_S),
        # As long the first time as the tenth.
        base_ejection_time=seconds(breaker.open_s),
        max_ejection_time=seconds(breaker.open_s),
        max_ejection_time_jitter=seconds(0),
        max_ejection_percent=100,
        # /health says nothing of inference: a worker that answers 500 stays out for its time.
        successful_active_health_check_uneject_host=False,
    )


def build_error_matcher(breaker: Breaker) -> MatchPredicate | None:
    """Return which answers count as errors; None: nobody is ejected.

    Without it every 5xx would count, also 501 and 505, which an odd request of a client brings about.
    """
    if not breaker.failures:
        return None
    statuses = "50[0234]|429" if breaker.count_429 else "50[0234]"
    match = StringMatcher(safe_regex=RegexMatcher(regex=statuses))
    header = HeaderMatcher(name=":status", string_match=match)
    return MatchPredicate(http_response_headers_match=HttpHeadersMatch(headers=[header]))
