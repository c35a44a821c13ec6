"""What Envoy thinks of the workers: its event logs and its admin endpoint, read into values.

Envoy checks health and ejects outliers; this service obeys. Each verdict is about one endpoint of one
cluster. Events come as lines of JSON as soon as Envoy decides; a reconciliation replaces what is known
by what Envoy's ``/clusters`` says, so that a lost line does no lasting harm.

Sources: Envoy's ``envoy/data/cluster/v3/outlier_detection_event.proto``,
``envoy/data/core/v3/health_check_event.proto`` and ``envoy/admin/v3/clusters.proto``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import msgspec

from extproc.address import join_host_port

Key = tuple[str, str]
"""Cluster and endpoint (``ip:port``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What Envoy thinks of one endpoint."""

    passing: bool | None = None
    """Whether health checks pass; None before the first one has passed."""

    ejected: bool = False
    """Whether outlier detection keeps it out."""

    failure: str = ""
    """Why it is not passing."""

    ejection: str = ""
    """Why it is ejected."""

    @property
    def reason(self) -> str:
        """Why requests may not go there."""
        return self.ejection if self.ejected else self.failure

    @property
    def down(self) -> bool:
        """Whether it seems not to be there, rather than to answer with errors."""
        return self.passing is False or self.ejection == _UNREACHABLE

    @property
    def good(self) -> bool:
        """Whether requests may go there."""
        return self.passing is True and not self.ejected


UNKNOWN = Verdict()


class _SocketAddress(msgspec.Struct):
    address: str = ""
    port_value: int = 0


class _Address(msgspec.Struct):
    socket_address: _SocketAddress | None = None

    def endpoint(self) -> str:
        found = self.socket_address
        if found is None:
            return ""
        try:
            return join_host_port(found.address, found.port_value)
        except OSError as error:
            raise ValueError(f"not from Envoy: an address {found.address!r}") from error


class _Failure(msgspec.Struct):
    failure_type: str = ""
    http_status_code: int = 0


class _Line(msgspec.Struct):
    """Fields of either kind of event."""

    cluster_name: str = ""
    # outlier detection
    upstream_url: str = ""
    action: str = ""
    type: str = ""
    enforced: bool = False
    # health checks
    host: _Address | None = None
    add_healthy_event: dict[str, bool] | None = None
    eject_unhealthy_event: _Failure | None = None
    health_check_failure_event: _Failure | None = None


class _HealthStatus(msgspec.Struct):
    failed_active_health_check: bool = False
    failed_outlier_check: bool = False
    pending_active_hc: bool = False
    failed_active_degraded_check: bool = False


class _Host(msgspec.Struct):
    address: _Address
    health_status: _HealthStatus = msgspec.field(default_factory=_HealthStatus)


class _Cluster(msgspec.Struct):
    name: str = ""
    host_statuses: list[_Host] = []


class _Clusters(msgspec.Struct):
    cluster_statuses: list[_Cluster] = []


_line_decoder = msgspec.json.Decoder(_Line)
_clusters_decoder = msgspec.json.Decoder(_Clusters)

_FAILURES = {
    "NETWORK": "it cannot be reached",
    "NETWORK_TIMEOUT": "it did not answer in time",
    "PASSIVE": "it asked to be left alone",
}
_UNREACHABLE = "connections failed in a row"
_EJECTIONS = {
    "CONSECUTIVE_5XX": "errors in a row (5xx)",
    "CONSECUTIVE_GATEWAY_FAILURE": "gateway errors in a row (502, 503, 504)",
    "CONSECUTIVE_LOCAL_ORIGIN_FAILURE": _UNREACHABLE,
}


class Verdicts:
    """The latest verdict on every endpoint that Envoy has spoken of."""

    def __init__(self) -> None:
        self._known: dict[Key, Verdict] = {}
        self._spoken: set[Key] = set()
        """Endpoints with an event since the last ``begin_reconciliation``."""

    def get(self, cluster: str, endpoint: str) -> Verdict:
        """Return the verdict on *endpoint* in *cluster*."""
        return self._known.get((cluster, endpoint), UNKNOWN)

    def keep(self, keys: Collection[Key]) -> None:
        """Drop the verdicts on all others: an endpoint that returns to a cluster is checked anew."""
        self._known = {key: verdict for key, verdict in self._known.items() if key in keys}

    def on_line(self, line: bytes) -> Key | None:
        """Take one line of an event log; return whom it changed. ``ValueError`` when it is not one."""
        event = _decode_line(line)
        endpoint = event.host.endpoint() if event.host is not None else event.upstream_url
        key = (event.cluster_name, endpoint)
        old = self._known.get(key, UNKNOWN)
        new = _after(old, event)
        self._spoken.add(key)
        if new == old:
            return None
        self._known[key] = new
        return key

    def begin_reconciliation(self) -> None:
        """Note that Envoy is being asked: what it says of an endpoint with an event meanwhile is older."""
        self._spoken.clear()

    def reconcile(self, clusters: bytes, *, starting: bool = False) -> list[Key]:
        """Take Envoy's ``/clusters?format=json``; return whom it changed.

        *starting*: this service has just started, and no event that came before is known to it: an
        endpoint that fails may have passed before.

        Endpoints that Envoy does not mention keep their verdict: one that has just started has yet to
        hear of them, and must not make the service doubt its workers.
        """
        found = _decode_clusters(clusters)
        changed = []
        for key, status in found.items():
            if key in self._spoken:
                continue
            old = self._known.get(key, UNKNOWN)
            new = _according_to(status, Verdict(passing=True) if starting else old)
            if new != old:
                self._known[key] = new
                changed.append(key)
        return changed


def _after(old: Verdict, event: _Line) -> Verdict:
    if event.host is None:
        return _after_ejection(old, event)
    if event.add_healthy_event is not None:
        return dataclasses.replace(old, passing=True, failure="")
    if event.eject_unhealthy_event is not None:
        reason = _failure_reason(event.eject_unhealthy_event)
        return dataclasses.replace(old, passing=False, failure=reason)
    if event.health_check_failure_event is not None and not old.passing:
        # One check has failed, which for an endpoint that never passed is all there is to know.
        return dataclasses.replace(old, failure=_failure_reason(event.health_check_failure_event))
    return old


def _after_ejection(old: Verdict, event: _Line) -> Verdict:
    if event.action == "UNEJECT":
        return dataclasses.replace(old, ejected=False, ejection="")
    if event.action == "EJECT" and event.enforced:
        cause = _EJECTIONS.get(event.type, event.type.lower().replace("_", " "))
        return dataclasses.replace(old, ejected=True, ejection=cause)
    return old


def _failure_reason(failure: _Failure) -> str:
    status = failure.http_status_code
    if status:
        return f"its health check answers {status}"
    return _FAILURES.get(failure.failure_type, "its health check fails")


def _according_to(status: _HealthStatus, old: Verdict) -> Verdict:
    passing: bool | None
    if status.pending_active_hc:  # Envoy has not asked yet, perhaps because it has just started
        passing = old.passing
    elif status.failed_active_health_check:
        # An endpoint that never passed is not unhealthy but not there yet.
        passing = None if old.passing is None else False
    else:
        passing = True
    failure = "" if passing else old.failure
    if status.failed_active_health_check and not status.pending_active_hc:
        failure = failure or "its health check fails"
    ejected = status.failed_outlier_check
    ejection = (old.ejection or "errors in a row") if ejected else ""
    return Verdict(passing, ejected, failure, ejection)


def _decode_line(line: bytes) -> _Line:
    try:
        event = _line_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an event of Envoy: {error}") from error
    if not event.cluster_name or (event.host is None and not event.upstream_url):
        raise ValueError("not an event of Envoy: it names no endpoint")
    return event


def _decode_clusters(text: bytes) -> Mapping[Key, _HealthStatus]:
    try:
        clusters = _clusters_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not Envoy's list of clusters: {error}") from error
    return {
        (cluster.name, endpoint): host.health_status
        for cluster in clusters.cluster_statuses
        for host in cluster.host_statuses
        if (endpoint := host.address.endpoint())  # no Unix socket
    }
