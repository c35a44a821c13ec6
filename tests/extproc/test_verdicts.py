"""What Envoy says of workers, as its version 1.40 says it."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.verdicts import UNKNOWN, Verdict, Verdicts

HERE = ("p", "127.0.0.1:19001")
PASSING = Verdict(passing=True)

# Lines as Envoy 1.40 wrote them; the endpoint apart.
EJECT = (
    b'{"type":"CONSECUTIVE_LOCAL_ORIGIN_FAILURE","timestamp":"2026-11-30T01:56:11.684Z",'
    b'"cluster_name":"p","upstream_url":"127.0.0.1:19001","action":"EJECT","num_ejections":1,'
    b'"enforced":true,"eject_consecutive_event":{}}'
)
UNEJECT = (
    b'{"type":"CONSECUTIVE_5XX","timestamp":"2026-11-30T01:56:21.684Z","secs_since_last_action":"10",'
    b'"cluster_name":"p","upstream_url":"127.0.0.1:19001","action":"UNEJECT","num_ejections":1,'
    b'"enforced":false}'
)
HOST = (
    b'"host":{"socket_address":{"protocol":"TCP","address":"127.0.0.1","port_value":19001,'
    b'"resolver_name":"","ipv4_compat":false,"network_namespace_filepath":""}}'
)
REST = (
    b'"timestamp":"2026-11-30T01:56:09.671Z","metadata":{"filter_metadata":{},'
    b'"typed_filter_metadata":{}},"locality":{"region":"","zone":"","sub_zone":""}}'
)
HEALTHY = (
    b'{"health_checker_type":"HTTP",' + HOST + b',"cluster_name":"p",'
    b'"add_healthy_event":{"first_check":true},' + REST
)
FAILED = (
    b'{"health_checker_type":"HTTP",' + HOST + b',"cluster_name":"p",'
    b'"timestamp":"2026-11-30T01:56:09.671Z","health_check_failure_event":'
    b'{"failure_type":"NETWORK_TIMEOUT","first_check":true,"http_status_code":0}}'
)
UNHEALTHY = (
    b'{"health_checker_type":"HTTP",' + HOST + b',"cluster_name":"p",'
    b'"eject_unhealthy_event":{"failure_type":"ACTIVE","http_status_code":500},' + REST
)
DEGRADED = (
    b'{"health_checker_type":"HTTP",' + HOST + b',"cluster_name":"p","degraded_healthy_host":{},'
) + REST


def told(*lines):
    verdicts = Verdicts()
    for line in lines:
        verdicts.on_line(line)
    return verdicts.get(*HERE)


def status(*, endpoint=("127.0.0.1", 19001), cluster="p", **health):
    """Return ``/clusters?format=json`` with one worker, as Envoy writes it."""
    address, port = endpoint
    return json.dumps(
        {
            "cluster_statuses": [
                {
                    "name": "extproc",
                    "host_statuses": [
                        {
                            "address": {"pipe": {"path": "/run/extproc.sock"}},
                            "stats": [{"name": "cx_connect_fail"}],
                            "health_status": {"eds_health_status": "HEALTHY"},
                            "weight": 1,
                        }
                    ],
                },
                {
                    "name": cluster,
                    "added_via_api": True,
                    "success_rate_ejection_threshold": {"value": -1},
                    "host_statuses": [
                        {
                            "address": {"socket_address": {"address": address, "port_value": port}},
                            "stats": [{"value": "3", "name": "rq_total"}],
                            "health_status": {"eds_health_status": "HEALTHY", **health},
                            "weight": 1,
                            "locality": {},
                        }
                    ],
                },
                {"name": "empty"},
            ]
        }
    ).encode()


def test_endpoint_that_was_never_spoken_of_is_unknown():
    """It is neither good nor bad."""
    assert Verdicts().get(*HERE) == UNKNOWN
    assert not UNKNOWN.good


@pytest.mark.parametrize(
    ("lines", "passing", "ejected", "reason"),
    [
        ([HEALTHY], True, False, ""),
        ([FAILED], None, False, "it did not answer in time"),
        ([FAILED, HEALTHY], True, False, ""),
        ([HEALTHY, FAILED], True, False, ""),
        ([HEALTHY, UNHEALTHY], False, False, "its health check answers 500"),
        ([HEALTHY, UNHEALTHY, FAILED], False, False, "it did not answer in time"),
        ([HEALTHY, UNHEALTHY, HEALTHY], True, False, ""),
        ([HEALTHY, DEGRADED], True, False, ""),
        ([HEALTHY, EJECT], True, True, "connections failed in a row"),
        ([HEALTHY, EJECT, UNEJECT], True, False, ""),
        ([EJECT], None, True, "connections failed in a row"),
        ([HEALTHY, EJECT, UNHEALTHY], False, True, "connections failed in a row"),
        ([HEALTHY, EJECT, UNHEALTHY, UNEJECT], False, False, "its health check answers 500"),
        ([HEALTHY, UNHEALTHY, EJECT, UNEJECT], False, False, "its health check answers 500"),
        ([HEALTHY, UNHEALTHY, EJECT, HEALTHY], True, True, "connections failed in a row"),
        ([UNEJECT], None, False, ""),
    ],
)
def test_events_of_envoy_become_a_verdict(lines, passing, ejected, reason):
    """Health and ejection are judged apart, each with its own reason."""
    verdict = told(*lines)

    assert (verdict.passing, verdict.ejected, verdict.reason) == (passing, ejected, reason)
    assert verdict.good is (passing is True and not ejected)


def test_only_what_changes_a_verdict_is_reported():
    """Cluster and endpoint of the line that changed it, else None."""
    verdicts = Verdicts()

    found = [verdicts.on_line(line) for line in (HEALTHY, HEALTHY, UNEJECT, EJECT, EJECT, UNEJECT)]

    assert found == [HERE, None, None, HERE, None, HERE]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ({"failure_type": "ACTIVE", "http_status_code": 503}, "its health check answers 503"),
        ({"failure_type": "NETWORK"}, "it cannot be reached"),
        ({"failure_type": "NETWORK_TIMEOUT"}, "it did not answer in time"),
        ({"failure_type": "PASSIVE"}, "it asked to be left alone"),
        ({"failure_type": "ACTIVE"}, "its health check fails"),
        ({"failure_type": "NEW_KIND"}, "its health check fails"),
        ({}, "its health check fails"),
    ],
)
def test_failed_check_says_why(failure, reason):
    """In words for operators; a status where there was one."""
    line = json.loads(UNHEALTHY) | {"eject_unhealthy_event": failure}

    assert told(json.dumps(line).encode()).reason == reason


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("CONSECUTIVE_5XX", "errors in a row (5xx)"),
        ("CONSECUTIVE_GATEWAY_FAILURE", "gateway errors in a row (502, 503, 504)"),
        ("CONSECUTIVE_LOCAL_ORIGIN_FAILURE", "connections failed in a row"),
        ("SUCCESS_RATE", "success rate"),
    ],
)
def test_ejection_says_why(kind, reason):
    """A kind that is not known is given by its own name."""
    line = json.loads(EJECT) | {"type": kind}

    assert told(json.dumps(line).encode()) == Verdict(ejected=True, ejection=reason)


def test_ejection_that_is_not_enforced_is_none():
    """Envoy writes what it would have done, too."""
    assert told(EJECT.replace(b'"enforced":true', b'"enforced":false')) == UNKNOWN


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [("::1", "[::1]:8000"), ("2001:db8:0:0::1", "[2001:db8::1]:8000")],
)
def test_ipv6_endpoints_are_the_same_in_all_sources(address, endpoint):
    """In brackets and in the shortest form, however they are written."""
    host = {"socket_address": {"address": address, "port_value": 8000}}
    checked = {"cluster_name": "p", "host": host, "add_healthy_event": {}}
    ejected = {"cluster_name": "p", "upstream_url": endpoint, "action": "EJECT", "enforced": True}
    verdicts = Verdicts()

    for event in (checked, ejected):
        assert verdicts.on_line(json.dumps(event).encode()) == ("p", endpoint)
    verdicts.begin_reconciliation()

    assert verdicts.reconcile(status(endpoint=(address, 8000))) == [("p", endpoint)]
    assert verdicts.get("p", endpoint) == PASSING


def test_clusters_are_judged_apart():
    """An endpoint may be in several, and each has checks of its own."""
    verdicts = Verdicts()

    verdicts.on_line(HEALTHY)
    verdicts.on_line(UNHEALTHY.replace(b'"cluster_name":"p"', b'"cluster_name":"q"'))

    assert verdicts.get("p", HERE[1]).passing is True
    assert verdicts.get("q", HERE[1]).passing is False


JUNK = [
    b"",
    b"x",
    b"null",
    b"[]",
    b"7",
    b"{}",
    b'{"cluster_name":"p"}',
    b'{"upstream_url":"a:1"}',
    b'{"cluster_name":"","upstream_url":"a:1"}',
    b'{"cluster_name":7,"upstream_url":"a:1"}',
    b'{"cluster_name":"\xff","upstream_url":"a:1"}',
    b'{"cluster_name":"p","host":{"socket_address":{"address":"a:b","port_value":1}}}',
    b'{"cluster_name":"p","host":{"socket_address":{"address":"\\u0000:","port_value":1}}}',
    b'{"metadata":' * 50_000,
    b"[" * 100_000,
    EJECT[:-1],
]


@pytest.mark.parametrize("line", JUNK)
def test_line_that_is_no_event_is_refused(line):
    """And nothing changes."""
    verdicts = Verdicts()

    with pytest.raises(ValueError, match=r"."):
        verdicts.on_line(line)

    assert verdicts.get(*HERE) == UNKNOWN


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"cluster::default_priority::max_connections::1024",
        b"[]",
        b'{"cluster_statuses":{}}',
        b'{"cluster_statuses":[{"name":"p","host_statuses":[{}]}]}',
        status(endpoint=("a:b", 1)),
        b'{"x":' * 50_000,
    ],
)
def test_answer_that_is_no_list_of_clusters_is_refused(answer):
    """And nothing changes."""
    verdicts = Verdicts()
    verdicts.on_line(HEALTHY)

    with pytest.raises(ValueError, match=r"."):
        verdicts.reconcile(answer)

    assert verdicts.get(*HERE) == PASSING


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70_000) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
hosts = st.fixed_dictionaries(
    {},
    optional={
        "socket_address": st.fixed_dictionaries(
            {},
            optional={
                "address": st.text("0123456789abcdef.:", max_size=9),
                "port_value": json_values,
            },
        )
    },
)
junk_events = st.fixed_dictionaries(
    {},
    optional={
        "cluster_name": st.text(max_size=2) | json_values,
        "upstream_url": st.text(max_size=9) | json_values,
        "host": hosts | json_values,
        "action": st.sampled_from(["EJECT", "UNEJECT", ""]) | json_values,
        "type": json_values,
        "enforced": json_values,
        "add_healthy_event": json_values,
        "eject_unhealthy_event": json_values,
        "health_check_failure_event": json_values,
    },
)
junk_statuses = st.fixed_dictionaries(
    {"cluster_statuses": st.lists(st.fixed_dictionaries(
        {}, optional={"name": json_values, "host_statuses": st.lists(
            st.fixed_dictionaries({"address": hosts}, optional={"health_status": json_values}),
            max_size=2,
        )}
    ), max_size=2) | json_values}
)  # fmt: skip


@given(st.binary(max_size=60) | (junk_events | json_values).map(msgspec.json.encode))
def test_junk_in_a_log_is_a_value_error_and_nothing_else(line):
    """A log that is not Envoy's stops nothing."""
    with contextlib.suppress(ValueError):
        Verdicts().on_line(line)


@given(st.binary(max_size=60) | (junk_statuses | json_values).map(msgspec.json.encode))
def test_junk_for_clusters_is_a_value_error_and_nothing_else(answer):
    """An admin endpoint that is not Envoy's stops nothing."""
    with contextlib.suppress(ValueError):
        Verdicts().reconcile(answer)


PENDING = {"failed_active_health_check": True, "pending_active_hc": True}
FAILS = {"failed_active_health_check": True}


@pytest.mark.parametrize(
    ("lines", "health", "starting", "verdict"),
    [
        ([], {}, False, PASSING),
        ([], FAILS, False, Verdict(failure="its health check fails")),
        ([], FAILS, True, Verdict(passing=False, failure="its health check fails")),
        ([], PENDING, False, UNKNOWN),
        ([], PENDING, True, PASSING),
        (
            [],
            {"failed_outlier_check": True},
            False,
            Verdict(passing=True, ejected=True, ejection="errors in a row"),
        ),
        ([HEALTHY], PENDING, False, PASSING),
        ([HEALTHY], FAILS, False, Verdict(passing=False, failure="its health check fails")),
        ([FAILED], FAILS, False, Verdict(failure="it did not answer in time")),
        ([FAILED], PENDING, False, Verdict(failure="it did not answer in time")),
        ([HEALTHY, UNHEALTHY], {}, False, PASSING),
        (
            [HEALTHY, UNHEALTHY],
            FAILS,
            False,
            Verdict(passing=False, failure="its health check answers 500"),
        ),
        ([HEALTHY, EJECT], {}, False, PASSING),
        (
            [HEALTHY, EJECT],
            {"failed_outlier_check": True},
            False,
            Verdict(passing=True, ejected=True, ejection="connections failed in a row"),
        ),
        (
            [HEALTHY, EJECT],
            FAILS | {"failed_outlier_check": True},
            False,
            Verdict(False, True, "its health check fails", "connections failed in a row"),
        ),
    ],
)
def test_reconciliation_replaces_what_was_known(lines, health, starting, verdict):
    """A lost line does no lasting harm; reasons that are known stay."""
    verdicts = Verdicts()
    for line in lines:
        verdicts.on_line(line)
    before = verdicts.get(*HERE)

    verdicts.begin_reconciliation()
    changed = verdicts.reconcile(status(**health), starting=starting)

    assert verdicts.get(*HERE) == verdict
    assert changed == ([HERE] if verdict != before else [])


def test_reconciling_twice_changes_nothing_the_second_time():
    """The same answer is no news."""
    verdicts = Verdicts()
    answer = status(failed_active_health_check=True, failed_outlier_check=True)
    verdicts.reconcile(answer)

    verdicts.begin_reconciliation()

    assert verdicts.reconcile(answer) == []


def test_event_that_came_while_envoy_was_asked_counts():
    """The answer is older, even when the event changed nothing."""
    verdicts = Verdicts()
    verdicts.on_line(HEALTHY)

    verdicts.begin_reconciliation()
    verdicts.on_line(HEALTHY)
    assert HERE not in verdicts.reconcile(status(failed_active_health_check=True))
    assert verdicts.get(*HERE) == PASSING

    verdicts.begin_reconciliation()
    assert HERE in verdicts.reconcile(status(failed_active_health_check=True))


def test_endpoint_that_envoy_does_not_mention_keeps_its_verdict():
    """An Envoy that has just started has yet to hear of it."""
    verdicts = Verdicts()
    verdicts.on_line(HEALTHY)
    verdicts.begin_reconciliation()

    verdicts.reconcile(status(endpoint=("10.9.9.9", 1)))
    verdicts.reconcile(b'{"cluster_statuses":[]}')
    verdicts.reconcile(b"{}")

    assert verdicts.get(*HERE) == PASSING


def test_verdicts_are_kept_for_whom_it_is_said():
    """All others are as if Envoy had never spoken of them."""
    verdicts = Verdicts()
    verdicts.on_line(HEALTHY)
    other = HEALTHY.replace(b'"cluster_name":"p"', b'"cluster_name":"q"')
    verdicts.on_line(other)

    verdicts.keep({HERE, ("r", "x")})

    assert verdicts.get(*HERE) == PASSING
    assert verdicts.get("q", HERE[1]) == UNKNOWN
    assert verdicts.on_line(other) == ("q", HERE[1])


def test_endpoint_is_down_when_its_checks_or_connections_fail():
    """Rather than when it answers with errors."""
    assert not Verdict(passing=True).down
    assert not Verdict(passing=True, ejected=True, ejection="errors in a row (5xx)").down
    assert Verdict(passing=False, ejected=True, ejection="errors in a row (5xx)").down
    assert Verdict(passing=True, ejected=True, ejection="connections failed in a row").down
