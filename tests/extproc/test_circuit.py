"""The circuit breaker of one endpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.attempt import Attempt, Outcome
from extproc.circuit import (
    LOST_REPORT_S,
    REPORT_LAG_S,
    WARY_S,
    Circuit,
    CircuitRules,
    CircuitState,
)

NOW = 1_000_000.0
RULES = CircuitRules(failures=3, successes=2, open_s=60.0, window_s=120.0)
CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
FAILURES = (Outcome.FAILED, Outcome.LOST)


def told(circuit, outcome, now, *, status=0, started=None, ended=0.0):
    """Let *circuit* learn of an attempt, of which it hears at *now*."""
    status = status or {Outcome.FAILED: 500, Outcome.REFUSED: 429, Outcome.SUCCEEDED: 200}.get(
        outcome, 0
    )
    started = now if started is None else started
    return circuit.on_attempt(Attempt("e", outcome, status, started, ended or now), now)


def opened(rules=RULES, now=NOW):
    circuit = Circuit(rules)
    for _ in range(rules.failures):
        told(circuit, Outcome.FAILED, now)
    assert circuit.state is OPEN
    return circuit


def half_opened(rules=RULES, now=NOW):
    """Return a circuit that is half-open since *now*."""
    circuit = opened(rules, now - rules.open_s)
    assert circuit.advance(now, 0)
    return circuit


def envoy(circuit, *, ejected=False, passing=True, cluster="c", now=NOW):
    circuit.follow_envoy(cluster, now, ejected=ejected, cause="errors", passing=passing)


# --- closed


@pytest.mark.parametrize("outcome", FAILURES)
def test_opens_with_the_last_of_the_failures(outcome):
    """Not before; it tells that it did, why, and until when."""
    circuit = Circuit(RULES)

    said = [told(circuit, outcome, NOW + number) for number in range(3)]

    assert said == [False, False, True]
    assert circuit.state is OPEN
    what = "status 500" if outcome is Outcome.FAILED else "it broke off"
    when = "1970-01-12T13:47:42Z"
    assert circuit.reason == (
        f"3 failures in a row, the last one: {what}; it is tried again at {when}"
    )
    assert circuit.resumes_at == NOW + 62


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - set(FAILURES)))
def test_what_is_no_failure_never_opens(outcome):
    """Not even a worker that cannot be reached: it is not there, and comes back as a new one."""
    circuit = Circuit(RULES)

    assert not any(told(circuit, outcome, NOW + number) for number in range(20))

    assert (circuit.state, circuit.reason) == (CLOSED, "")


@pytest.mark.parametrize(("status", "opens"), [(429, True), (408, False)])
def test_429_counts_if_it_is_to(status, opens):
    """408 never does."""
    circuit = Circuit(CircuitRules(failures=2, count_429=True))

    for number in range(4):
        told(circuit, Outcome.REFUSED, NOW + number, status=status)

    assert (circuit.state is OPEN) is opens


def test_success_ends_the_row():
    """What comes after it counts anew."""
    circuit = Circuit(RULES)
    for number in range(30):
        told(circuit, Outcome.SUCCEEDED if number % 3 == 2 else Outcome.FAILED, NOW + number)

    assert circuit.state is CLOSED


def test_success_that_is_reported_late_does_not_undo_later_failures():
    """It ended before them; how late it may be has a limit, whatever Envoy's clock says."""
    circuit = Circuit(RULES)
    told(circuit, Outcome.FAILED, NOW)
    told(circuit, Outcome.FAILED, NOW + 0.1)
    told(circuit, Outcome.SUCCEEDED, NOW + 0.11, ended=NOW + 0.05)
    told(circuit, Outcome.FAILED, NOW + 0.12)
    assert circuit.state is CLOSED, "the first one is undone"

    told(circuit, Outcome.SUCCEEDED, NOW + 0.12 + REPORT_LAG_S + 0.01, ended=NOW - 3600)
    told(circuit, Outcome.FAILED, NOW + 1)
    told(circuit, Outcome.FAILED, NOW + 1)
    assert circuit.state is CLOSED

    told(circuit, Outcome.FAILED, NOW + 1)
    assert circuit.state is OPEN


@pytest.mark.parametrize(("apart_s", "state"), [(59, OPEN), (60, OPEN), (61, CLOSED)])
def test_only_failures_within_the_window_count(apart_s, state):
    """Three failures span twice the time between two of them."""
    circuit = Circuit(RULES)

    for number in range(3):
        told(circuit, Outcome.FAILED, NOW + number * apart_s)

    assert circuit.state is state


def test_window_slides():
    """An old failure does not hide the newer ones."""
    circuit = Circuit(RULES)

    for at in (0, 115, 119, 121):
        told(circuit, Outcome.FAILED, NOW + at)

    assert circuit.state is OPEN


def test_requests_that_one_loss_takes_along_count_once():
    """A later request counts again; answers count each."""
    circuit = Circuit(RULES)
    for number in range(40):
        told(circuit, Outcome.LOST, NOW + number / 1000, started=NOW - 10 + number / 10_000)
    assert circuit.state is CLOSED

    told(circuit, Outcome.LOST, NOW + 2, started=NOW + 1)
    assert circuit.state is CLOSED
    told(circuit, Outcome.FAILED, NOW + 2, started=NOW - 5)
    assert circuit.state is OPEN


def test_disabled_it_never_opens():
    """Whatever happens, and whatever Envoy says."""
    circuit = Circuit(CircuitRules(failures=0))
    for number in range(100):
        told(circuit, Outcome.FAILED, NOW + number)
    envoy(circuit, ejected=True)
    circuit.restore(NOW + 50, NOW)

    assert circuit.state is CLOSED


# --- failures in a row, before it opens


def failing(times, *, in_flight=5, now=NOW, failures=10):
    """Return a circuit that has failed so many *times* in a row, the last time at *now*."""
    circuit = Circuit(CircuitRules(failures=failures))
    for _ in range(times):
        circuit.on_attempt(Attempt("e", Outcome.FAILED, 500, now, now), now, in_flight)
    return circuit


@pytest.mark.parametrize(
    ("failures", "limit"), [(0, None), (1, None), (2, 9), (5, 6), (9, 2), (10, None)]
)
def test_from_the_second_failure_in_a_row_on_there_is_room_for_the_rest(failures, limit):
    """And for one more; an open circuit needs no such limit."""
    assert failing(failures).wary_limit == limit


@pytest.mark.parametrize(("in_flight", "limit"), [(11, 9), (12, 10), (40, 38)])
def test_what_is_under_way_has_room(in_flight, limit):
    """Long streams are replaced as they end, but for those that may be what failed."""
    assert failing(2, in_flight=in_flight).wary_limit == limit


def test_limit_ends_with_a_success():
    """One that ended before the failures says nothing of what came since."""
    circuit = failing(3)
    told(circuit, Outcome.SUCCEEDED, NOW + 0.01, ended=NOW - 0.01)
    assert circuit.wary_limit == 8

    told(circuit, Outcome.SUCCEEDED, NOW + 0.02)

    assert circuit.wary_limit is None


def test_limit_ends_a_second_after_the_last_failure():
    """The failures still count; the next one brings it back."""
    circuit = failing(3)
    assert not circuit.calm_down(NOW + WARY_S - 0.01)

    assert circuit.calm_down(NOW + WARY_S)

    assert circuit.wary_limit is None
    told(circuit, Outcome.FAILED, NOW + 5)
    assert circuit.wary_limit == 7


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_low_thresholds_know_no_limit(failures):
    """There is no failure between the second and the last one."""
    assert failing(2, failures=failures).wary_limit is None


# --- open


def test_open_circuit_waits_for_its_time():
    """Nothing that is reported meanwhile matters."""
    circuit = opened()

    for outcome in Outcome:
        assert not told(circuit, outcome, NOW + 30)
    assert not circuit.advance(NOW + 59.9, 5)
    assert circuit.state is OPEN
    assert circuit.advance(NOW + 60, 5)

    assert circuit.state is HALF_OPEN
    assert circuit.reason == "it is tried with one request at a time: 0 of 2 succeeded"


# --- half-open


def test_successes_in_a_row_close():
    """One request after the other."""
    circuit = half_opened()

    circuit.on_sent()
    assert circuit.probing
    assert told(circuit, Outcome.SUCCEEDED, NOW + 1)
    assert (circuit.state, circuit.probing) == (HALF_OPEN, False)
    circuit.on_sent()
    assert told(circuit, Outcome.SUCCEEDED, NOW + 2)

    assert (circuit.state, circuit.probing, circuit.failing) == (CLOSED, False, False)
    assert not told(circuit, Outcome.FAILED, NOW + 3), "it begins anew"


@pytest.mark.parametrize("outcome", [*FAILURES, Outcome.UNREACHABLE])
def test_one_failure_opens_again_for_the_full_time(outcome):
    """Successes before it are forgotten."""
    circuit = half_opened()
    circuit.on_sent()
    told(circuit, Outcome.SUCCEEDED, NOW + 1)
    circuit.on_sent()

    assert told(circuit, outcome, NOW + 2)

    assert (circuit.state, circuit.probing, circuit.resumes_at) == (OPEN, False, NOW + 62)
    assert circuit.reason.startswith("it failed when it was tried again: ")
    circuit.advance(NOW + 62, 0)
    told(circuit, Outcome.SUCCEEDED, NOW + 63)
    assert circuit.state is HALF_OPEN


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNKNOWN])
def test_probe_without_a_verdict_lets_the_next_one_go(outcome):
    """The client left, or the worker was busy: neither a success nor a failure."""
    circuit = half_opened()
    circuit.on_sent()

    assert told(circuit, outcome, NOW + 1)

    assert (circuit.state, circuit.probing) == (HALF_OPEN, False)
    assert not told(circuit, outcome, NOW + 1), "nobody waits for that"


def test_requests_from_before_are_no_probes():
    """Streams that were under way when the circuit opened end at last."""
    circuit = half_opened()
    circuit.on_sent()

    for outcome in Outcome:
        assert not told(circuit, outcome, NOW + 1, started=NOW - 61)

    assert (circuit.state, circuit.probing) == (HALF_OPEN, True)


def test_probe_whose_report_is_lost_ends_a_moment_after_nothing_is_under_way():
    """However long it takes itself."""
    circuit = half_opened()
    circuit.on_sent()

    assert not circuit.advance(NOW + 500, 1)
    assert not circuit.advance(NOW + 501, 0)
    assert not circuit.advance(NOW + 501 + LOST_REPORT_S - 0.1, 0)
    assert circuit.probing
    assert circuit.advance(NOW + 501 + LOST_REPORT_S, 0)

    assert (circuit.state, circuit.probing) == (HALF_OPEN, False)
    assert not circuit.advance(NOW + 600, 0)


# --- Envoy


def test_envoys_ejection_opens():
    """Reports may have been lost; its end is the end."""
    circuit = Circuit(RULES)
    envoy(circuit, ejected=True)
    assert (circuit.state, circuit.resumes_at) == (OPEN, NOW + 60)
    assert circuit.reason.startswith("errors; ")

    envoy(circuit, ejected=True, now=NOW + 5)
    assert circuit.resumes_at == NOW + 60
    envoy(circuit, now=NOW + 20)

    assert circuit.state is HALF_OPEN


def test_end_of_an_earlier_ejection_does_not_shorten_a_later_pause():
    """Envoy looks once a second: it takes a worker back when a probe may have failed already."""
    circuit = opened()
    envoy(circuit, ejected=True)
    circuit.advance(NOW + 60, 0)
    told(circuit, Outcome.FAILED, NOW + 60.5)

    envoy(circuit, now=NOW + 60.9)

    assert (circuit.state, circuit.resumes_at) == (OPEN, NOW + 120.5)


def test_ejection_that_goes_on_does_not_open_a_half_open_circuit():
    """It is the same one; a new one is news."""
    circuit = opened()
    envoy(circuit, ejected=True)
    circuit.advance(NOW + 60, 0)

    envoy(circuit, ejected=True, now=NOW + 60)
    assert circuit.state is HALF_OPEN
    envoy(circuit, now=NOW + 61)
    assert circuit.state is HALF_OPEN
    envoy(circuit, ejected=True, now=NOW + 62)

    assert circuit.state is OPEN


def test_ejection_for_failures_of_which_some_are_too_old_is_not_obeyed():
    """Envoy knows no window."""
    circuit = Circuit(RULES)
    for at in (0, 100, 200):
        told(circuit, Outcome.FAILED, NOW + at)

    envoy(circuit, ejected=True, now=NOW + 200)
    assert circuit.state is CLOSED
    told(circuit, Outcome.FAILED, NOW + 201)

    assert circuit.state is OPEN


def test_another_cluster_has_its_own_ejections():
    """A worker that moves is not taken back for that."""
    circuit = Circuit(RULES)
    envoy(circuit, ejected=True, cluster="a")

    envoy(circuit, cluster="b")

    assert circuit.state is OPEN


def test_health_that_returns_ends_the_pause():
    """The worker may have been started anew. Health that never failed says nothing."""
    circuit = opened()
    envoy(circuit, passing=True)
    assert circuit.state is OPEN
    envoy(circuit, passing=False)
    assert circuit.state is OPEN

    envoy(circuit, passing=True)

    assert circuit.state is HALF_OPEN


# --- restarts and other rules


@pytest.mark.parametrize(
    ("resumes_at", "state"),
    [(0.0, CLOSED), (NOW - 10, HALF_OPEN), (NOW + 30, OPEN), (NOW + 9999, OPEN)],
    ids=["was closed", "its time is over", "open", "rules are shorter now"],
)
def test_goes_on_after_a_restart(resumes_at, state):
    """As it was left."""
    circuit = Circuit(RULES)

    circuit.restore(resumes_at, NOW)

    assert circuit.state is state
    assert circuit.resumes_at == min(resumes_at, NOW + 60)
    if state is OPEN:
        assert circuit.advance(NOW + 60, 0)


def test_other_rules_apply_at_once():
    """Switched off, an open circuit closes."""
    circuit = opened()
    circuit.configure(CircuitRules(failures=7))
    assert circuit.state is OPEN

    circuit.configure(CircuitRules(failures=0))

    assert circuit.state is CLOSED


def test_failing_tells_of_the_latest_attempt():
    """Whatever kind of failure; nothing known changes nothing."""
    circuit = Circuit(RULES)
    for outcome in (Outcome.FAILED, Outcome.LOST, Outcome.REFUSED, Outcome.UNREACHABLE):
        told(circuit, outcome, NOW)
        assert circuit.failing
        told(circuit, Outcome.UNKNOWN, NOW)
        assert circuit.failing
        told(circuit, Outcome.SUCCEEDED, NOW)
        assert not circuit.failing


@given(
    threshold=st.integers(1, 12),
    outcomes=st.lists(st.sampled_from([Outcome.FAILED, Outcome.SUCCEEDED]), max_size=60),
)
def test_opens_exactly_when_so_many_fail_in_a_row(threshold, outcomes):
    """As a simple count says."""
    circuit = Circuit(CircuitRules(failures=threshold, window_s=1e6))
    row = 0
    for number, outcome in enumerate(outcomes):
        if row >= threshold:
            break
        told(circuit, outcome, NOW + number)
        row = 0 if outcome is Outcome.SUCCEEDED else row + 1
        assert (circuit.state is OPEN) is (row >= threshold)


class Histories(RuleBasedStateMachine):
    """Whatever happens in whatever order, the circuit stays a circuit."""

    def __init__(self):
        super().__init__()
        self.circuit = Circuit(RULES)
        self.now = NOW
        self.opened_at = None
        self.under_way = 0

    @rule(outcome=st.sampled_from(Outcome), late_s=st.sampled_from([0.0, 0.1, 5.0, 200.0]))
    def report(self, outcome, late_s):
        before = self.circuit.state
        said = told(
            self.circuit, outcome, self.now, started=self.now - late_s, ended=self.now - late_s / 2
        )
        assert said or self.circuit.state is before

    @rule()
    def send(self):
        if self.circuit.state is not OPEN and not self.circuit.probing:
            self.circuit.on_sent()
            self.under_way += 1

    @rule()
    def end(self):
        self.under_way = max(0, self.under_way - 1)

    @rule(ejected=st.booleans(), passing=st.sampled_from([None, True, False]))
    def judge(self, ejected, passing):
        envoy(self.circuit, ejected=ejected, passing=passing, now=self.now)

    @rule(passed_s=st.sampled_from([0.1, 1.0, 30.0, 61.0]))
    def wait(self, passed_s):
        self.now += passed_s
        self.circuit.advance(self.now, self.under_way)
        assert self.circuit.state is not OPEN or self.circuit.resumes_at > self.now

    @invariant()
    def makes_sense(self):
        circuit = self.circuit
        assert bool(circuit.reason) is (circuit.state is not CLOSED)
        assert bool(circuit.resumes_at) is (circuit.state is not CLOSED)
        assert not circuit.probing or circuit.state is HALF_OPEN
        assert circuit.resumes_at <= self.now + RULES.open_s


TestHistories = Histories.TestCase


def test_probe_without_a_report_does_not_wait_for_older_streams():
    """One that was there before the circuit opened may last for an hour."""
    circuit = Circuit(CircuitRules(failures=1, open_s=10))
    circuit.on_attempt(Attempt("w", Outcome.FAILED, 500, NOW, NOW), NOW)
    circuit.advance(NOW + 10, 1)
    circuit.on_sent(2)

    assert not circuit.advance(NOW + 11, 2)  # the probe is under way
    assert not circuit.advance(NOW + 12, 1)  # it has just ended
    assert circuit.advance(NOW + 12 + LOST_REPORT_S, 1)
    assert not circuit.probing
