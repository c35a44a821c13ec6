"""How many retries requests may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.retry_budget import KEPT_S, REFILL_PER_S, RESERVE, USUAL_RETRIES, RetryBudget

MOST = 5


def make(ratio=0.2, most=MOST):
    return RetryBudget(ratio=ratio, most=most)


def storm(budget, requests, *, in_flight=1, now=0.0, sound=False):
    """Let requests come one after the other that all fail as often as they may; return the retries."""
    total = 0
    for _ in range(requests):
        granted = budget.grant(in_flight, now, sound=sound)
        for _ in range(granted + 1):
            budget.on_failed()
        budget.on_ended(granted, failed=True)
        total += granted
    return total


def test_the_first_requests_may_have_all():
    """There is a reserve."""
    assert make().grant(1, 0.0, sound=True) == MOST


def test_storm_uses_up_the_reserve_and_then_its_share():
    """As long as it lasts."""
    budget = make()

    assert RESERVE <= storm(budget, 1000) <= 0.2 * 1000 + RESERVE
    assert budget.exhausted > 500
    assert 190 <= storm(budget, 1000) <= 0.2 * 1000 + 1


def test_many_at_once_share_what_is_left():
    """So that all of them together do not exceed it."""
    budget = make()

    granted = [budget.grant(number, 0.0, sound=False) for number in range(1, 50)]

    assert granted[:4] == [5, 5, 5, 5]
    assert granted[-1] == 0
    assert granted == sorted(granted, reverse=True)


def test_worker_that_serves_is_worth_two_retries():
    """However many requests are under way, while there is a balance."""
    budget = make()
    assert budget.grant(10_000, 0.0, sound=True) == USUAL_RETRIES
    for _ in range(25):
        budget.on_failed()

    assert budget.grant(10_000, 0.0, sound=True) == 0


def test_failed_attempt_counts_before_its_request_has_ended():
    """A retried request may stream for minutes."""
    budget = make(ratio=0.0)
    for _ in range(20):
        assert budget.grant(1, 0.0, sound=True)
        budget.on_failed()

    assert budget.grant(1, 0.0, sound=True) == 0
    for _ in range(20):
        budget.on_ended(0, failed=True)
    assert budget.grant(1, 0.0, sound=True) == MOST, "none of them was retried"


def test_reserve_fills_in_quiet_times():
    """One token a second, up to the reserve."""
    budget = make(ratio=0.0)
    storm(budget, 100)
    assert budget.grant(1, 0.0, sound=True) == 0

    assert budget.grant(1, 1 / REFILL_PER_S + 0.1, sound=False) == 1
    budget.grant(1, 10_000.0, sound=True)

    assert budget.balance == RESERVE


def test_debt_has_a_limit():
    """What requests under way cost beyond the balance is not held against others for long."""
    budget = make()
    budget.on_ended(5000, failed=False)

    assert budget.balance == -RESERVE


def test_savings_have_a_limit():
    """The last minute's requests earn it; what was earned before is gone."""
    budget = make()
    for second in range(3 * KEPT_S):
        for _ in range(10):
            budget.grant(1, float(second), sound=True)
    assert budget.balance == pytest.approx(0.2 * 10 * KEPT_S, rel=0.02)

    budget.grant(1, 10_000.0, sound=True)

    assert budget.balance == RESERVE


def test_payment_in_advance_for_a_client_that_left_is_forgotten():
    """It never settles."""
    budget = make(ratio=0.0)
    for _ in range(200):
        budget.on_failed()
    assert budget.grant(1, 0.0, sound=True) == 0

    assert budget.grant(1, 90.0, sound=True) == MOST


def test_without_retries_nothing_is_exhausted():
    """Nobody asked for any."""
    budget = make(most=0)

    assert budget.grant(1, 0.0, sound=True) == 0
    assert budget.exhausted == 0


def test_other_figures_apply_at_once():
    """From the next request on."""
    budget = make()
    budget.configure(ratio=0.5, most=1)

    assert budget.grant(1, 0.0, sound=True) == 1
    assert (budget.ratio, budget.most) == (0.5, 1)


@given(
    ratio=st.floats(0, 1),
    most=st.integers(0, 8),
    steps=st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 1.0, 30.0]), st.integers(1, 40), st.integers(0, 8)),
        max_size=150,
    ),
)
def test_retries_stay_within_what_was_earned(ratio, most, steps):
    """Reserve, refill and the requests' share bound them, whatever requests use of their grants."""
    budget = make(ratio, most)
    now, used = 0.0, 0
    for passed_s, in_flight, wanted in steps:
        now += passed_s
        granted = budget.grant(in_flight, now, sound=False)
        assert 0 <= granted <= most
        retries = min(granted, wanted)
        for _ in range(retries + 1):
            budget.on_failed()
        budget.on_ended(retries, failed=wanted > granted)
        used += retries
    earned = RESERVE + REFILL_PER_S * now + ratio * len(steps)
    assert used <= earned + 1e-6
