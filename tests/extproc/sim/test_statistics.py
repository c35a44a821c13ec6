"""Histograms."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.statistics import Histogram


@given(st.lists(st.floats(-1, 5)))
def test_buckets_count_values_up_to_their_bound(values):
    """As Prometheus defines ``le``; what is negative counts as zero."""
    histogram = Histogram((0.5, 1.0, 2.0))

    for value in values:
        histogram.observe(value)

    clamped = [max(value, 0.0) for value in values]
    assert histogram.cumulative() == [
        *(sum(value <= bound for value in clamped) for bound in (0.5, 1.0, 2.0)),
        len(values),
    ]
