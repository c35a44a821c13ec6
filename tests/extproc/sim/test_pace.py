"""The timetable of a fixed pace."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.pace import Timetable


@given(st.lists(st.integers(0, 20)), st.integers(0, 20))
def test_due_entries_leave_in_order_and_the_others_stay(dues, now):
    """Earliest first, ties in the order they came."""
    timetable = Timetable()
    for index, due in enumerate(dues):
        timetable.add((due, index), due)

    popped = timetable.pop_due(now)

    assert popped == sorted((due, index) for index, due in enumerate(dues) if due <= now)
    assert timetable.next_due() == min((due for due in dues if due > now), default=None)
