"""503 for everybody, as long as nobody can be told from anybody else."""

from __future__ import annotations

from envoy_data_plane.envoy.extensions.filters.http.fault.v3 import FaultAbort, HttpFault
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType
from envoy_data_plane.google.protobuf import Any

DETAILS = "fault_filter_abort"
"""What Envoy calls it."""


def build_locked_out() -> Any:
    """Return the filter."""
    always = FractionalPercent(numerator=100, denominator=FractionalPercentDenominatorType.HUNDRED)
    return Any.pack(HttpFault(abort=FaultAbort(http_status=503, percentage=always)))
