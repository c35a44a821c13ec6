"""Rates: how many requests come in, over all clients and of each.

Buckets are Envoy's own: one for all of its threads, filled steadily and not once a second. The client's
bucket is asked first, so a client that is over its rate takes nothing from the others.

``envoy-data-plane`` has no ``enable_retry_after_header`` yet, which came with Envoy 1.40; the message here has
the shape of ``envoy/extensions/filters/http/local_ratelimit/v3/local_rate_limit.proto``, as far as it is used.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable

import betterproto2
from envoy_data_plane.envoy.config.core.v3 import RuntimeFractionalPercent, TypedExtensionConfig
from envoy_data_plane.envoy.config.route.v3 import RateLimit, RateLimitAction
from envoy_data_plane.envoy.extensions.common.ratelimit.v3 import (
    LocalRateLimitDescriptor,
    RateLimitDescriptorEntry,
    XRateLimitHeadersRfcVersion,
)
from envoy_data_plane.envoy.extensions.rate_limit_descriptors.expr.v3 import Descriptor
from envoy_data_plane.envoy.type.v3 import (
    FractionalPercent,
    FractionalPercentDenominatorType,
    TokenBucket,
)
from envoy_data_plane.google.protobuf import Any, BoolValue, UInt32Value
from envoy_data_plane.message_pool import default_message_pool
from pydantic.dataclasses import dataclass

from extproc.xds.model import CLIENT_HEADER, RateLimits
from extproc.xds.slots import build_empty
from extproc.xds.wire import seconds

KEY_HEADERS = (CLIENT_HEADER, "authorization", "x-api-key", "x-tenant-id")
"""The first that a request has tells whose bucket it takes from; without any there is only that of all."""

MAX_CLIENTS = 10_000
"""Buckets that Envoy keeps at most; the one that was not used for longest is dropped, and is full when its
client comes back."""

BURST_S = 0.2
"""How much of a rate may come at once, if nothing else is said. Little, so that rates hold from the
first second."""

MIN_BURST = 2
"""If nothing else is said. A bucket of one is full when the next request comes a little late, and what would have
filled it further is lost: of 11 requests per second it lets every second one through where 10 are allowed."""

_KIND, _CLIENT = "kind", "client"


@dataclass(eq=False, repr=False, config={"extra": "forbid"})
class LocalRateLimit(betterproto2.Message):
    """Configuration of the filter."""

    stat_prefix: str = betterproto2.field(1, betterproto2.TYPE_STRING)
    token_bucket: TokenBucket | None = betterproto2.field(
        3, betterproto2.TYPE_MESSAGE, optional=True
    )
    filter_enabled: RuntimeFractionalPercent | None = betterproto2.field(
        4, betterproto2.TYPE_MESSAGE, optional=True
    )
    filter_enforced: RuntimeFractionalPercent | None = betterproto2.field(
        5, betterproto2.TYPE_MESSAGE, optional=True
    )
    descriptors: list[LocalRateLimitDescriptor] = betterproto2.field(
        8, betterproto2.TYPE_MESSAGE, repeated=True
    )
    enable_x_ratelimit_headers: XRateLimitHeadersRfcVersion = betterproto2.field(
        12, betterproto2.TYPE_ENUM, default_factory=lambda: XRateLimitHeadersRfcVersion(0)
    )
    always_consume_default_token_bucket: bool | None = betterproto2.field(
        14, betterproto2.TYPE_MESSAGE, unwrap=lambda: BoolValue, optional=True
    )
    rate_limits: list[RateLimit] = betterproto2.field(17, betterproto2.TYPE_MESSAGE, repeated=True)
    max_dynamic_descriptors: int | None = betterproto2.field(
        18, betterproto2.TYPE_MESSAGE, unwrap=lambda: UInt32Value, optional=True
    )
    enable_retry_after_header: bool = betterproto2.field(19, betterproto2.TYPE_BOOL)
    """Whether refusals say after how many seconds there is room."""


default_message_pool.register_message(
    "envoy.extensions.filters.http.local_ratelimit.v3", "LocalRateLimit", LocalRateLimit
)


def build_rate_limit(limits: RateLimits) -> Any:
    """Return the filter that refuses what is too much."""
    if not limits.per_second and not limits.per_key:
        return build_empty()
    config = LocalRateLimit(
        stat_prefix="rates",
        filter_enabled=_always(),
        filter_enforced=_always(),
        enable_x_ratelimit_headers=XRateLimitHeadersRfcVersion.DRAFT_VERSION_03,
        enable_retry_after_header=True,
    )
    if limits.per_second:
        config.token_bucket = build_bucket(limits.per_second, limits.burst)
    else:
        config.always_consume_default_token_bucket = False
    if limits.per_key:
        config.max_dynamic_descriptors = MAX_CLIENTS
        config.rate_limits = [RateLimit(actions=[_whose(_KIND), _whose(_CLIENT)])]
        config.descriptors = [
            LocalRateLimitDescriptor(
                entries=[
                    RateLimitDescriptorEntry(key=_KIND),
                    RateLimitDescriptorEntry(key=_CLIENT),
                ],
                token_bucket=build_bucket(limits.per_key, limits.burst),
            )
        ]
    return Any.pack(config)


def build_bucket(rate: float, burst: int) -> TokenBucket:
    """Return a bucket that lets *rate* requests through per second, *burst* at once (0: a fifth of a second's)."""
    fill = max(1, round(rate))
    return TokenBucket(
        max_tokens=burst or max(MIN_BURST, math.ceil(rate * BURST_S)),
        tokens_per_fill=fill,
        fill_interval=seconds(fill / rate),
    )


def _whose(key: str) -> RateLimitAction:
    """Say what tells one client's bucket from another's: the value of a header, and of which.

    Envoy's CEL cannot join strings, so these are two entries.
    """
    *others, last = (
        (name, f"'{name}'" if key == _KIND else f"request.headers['{name}']")
        for name in KEY_HEADERS
    )
    # A header that is missing is an error, and then there is no bucket.
    text = f"'{last[0]}' in request.headers ? {last[1]} : request.headers['{last[0]}']"
    for name, value in reversed(others):
        text = f"'{name}' in request.headers ? {value} : ({text})"
    # mypy takes it for the class of google.protobuf that its module imports under the same name.
    make: Callable[..., betterproto2.Message] = typing.cast(typing.Any, Descriptor)
    expression = make(descriptor_key=key, skip_if_error=True, text=text)
    return RateLimitAction(
        extension=TypedExtensionConfig(
            name="envoy.rate_limit_descriptors.expr", typed_config=Any.pack(expression)
        )
    )


def _always() -> RuntimeFractionalPercent:
    hundred = FractionalPercent(numerator=100, denominator=FractionalPercentDenominatorType.HUNDRED)
    return RuntimeFractionalPercent(default_value=hundred)
