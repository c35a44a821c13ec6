"""Which requests a fault plan spoils."""

import random

import msgspec
import pytest

from extproc.sim.faults import FaultPlan, Faults, Verdict, merge


def verdicts(faults, count, *, seed=0):
    """Return what happens to the first *count* requests."""
    plan = FaultPlan(faults, random.Random(seed))
    return [plan.judge() for _ in range(count)]


def test_healthy_by_default():
    """No flag, no fault."""
    assert set(verdicts(Faults(), 100)) == {Verdict.SERVE}


def test_the_first_requests_fail():
    """And no other."""
    assert verdicts(Faults(fail_first_n=2), 4) == [Verdict.FAIL] * 2 + [Verdict.SERVE] * 2


def test_one_request_kills():
    """Even when it would fail anyway."""
    assert verdicts(Faults(crash_on_request=2, fail_first_n=9), 2) == [Verdict.FAIL, Verdict.CRASH]


def test_random_failures_follow_rate_and_seed():
    """The same seed fails the same requests."""
    faults = Faults(random_fail_rate=0.3)
    once = verdicts(faults, 2000, seed=1)

    assert once == verdicts(faults, 2000, seed=1) != verdicts(faults, 2000, seed=2)
    assert 500 < once.count(Verdict.FAIL) < 700


def test_new_faults_count_from_their_start():
    """``fail_first_n`` set at run time means the next requests."""
    plan = FaultPlan(Faults(), random.Random(0))
    plan.judge()

    plan.replace(Faults(fail_first_n=1))

    assert [plan.judge(), plan.judge()] == [Verdict.FAIL, Verdict.SERVE]


def test_a_patch_changes_only_its_fields():
    """An empty one changes nothing."""
    faults = Faults(fail_first_n=3, stall_after=5)

    assert merge(faults, b'{"stall_after": null}') == Faults(fail_first_n=3)
    assert merge(faults, b"") == faults


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (b'{"fail": 1}', "unknown field `fail`"),
        (b'{"status_code": 200}', "status_code must be 400 to 599, got 200"),
        (b'{"random_fail_rate": 2}', "random_fail_rate must be 0 to 1, got 2.0"),
        (b'{"stall_after": -1}', "stall_after must be >= 0, got -1"),
        (b'{"slowdown": 0.5}', "slowdown must be 1 to 1000000, got 0.5"),
        (b'{"slowdown": 1e999}', "Number out of range"),
        (b'{"retry_after_s": -1}', "retry_after_s must be >= 0, got -1"),
        (b'{"health_status": 99}', "health_status must be 200 to 599, got 99"),
        (b'{"models_status": 600}', "models_status must be 200 to 599, got 600"),
        (b'{"health_hang": 1}', "Expected `bool`, got `int`"),
        (b'{"fail_first_n": "x"}', "Expected `int`, got `str`"),
        (b"{", "truncated"),
    ],
)
def test_a_wrong_patch_is_named(patch, message):
    """The operator sees which field is wrong."""
    with pytest.raises(msgspec.DecodeError, match=message):
        merge(Faults(), patch)
