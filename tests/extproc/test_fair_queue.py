"""Strict priority, turns among tenants, first come first served within one."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fair_queue import FairQueue


@dataclasses.dataclass(eq=False)
class Item:
    tenant: str = ""
    priority: int = 0
    number: int = 0


def fill(*items):
    queue = FairQueue()
    for item in items:
        queue.push(item)
    return queue


def drain(queue):
    """Serve all, in order."""
    served = []
    while queue:
        item = queue.head()
        queue.remove(item, served=True)
        served.append(item)
    return served


def test_one_tenant_is_served_in_order_of_coming():
    """A plain queue, as long as nobody says who it is."""
    items = [Item(number=n) for n in range(5)]

    assert drain(fill(*items)) == items


def test_tenant_with_a_thousand_waiting_does_not_delay_one_with_one():
    """Whoever comes last with a single request is served after one of the other's."""
    many = [Item("a", number=n) for n in range(1000)]
    one = Item("b")

    served = drain(fill(*many, one))

    assert served.index(one) == 1
    assert [item for item in served if item.tenant == "a"] == many


def test_tenants_take_turns():
    """Each gets the same share while all have something waiting."""
    queue = fill(*(Item(tenant, number=n) for tenant in "abc" for n in range(10)))

    first = drain(queue)[:15]

    assert Counter(item.tenant for item in first) == {"a": 5, "b": 5, "c": 5}


def test_higher_priority_goes_first_whoever_asks():
    """Strictly: nothing of a lower class while there is one of a higher."""
    low, middle, high = (Item("a", priority) for priority in (-100, 0, 100))
    late = Item("b", 100)

    assert drain(fill(low, middle, high, late)) == [high, late, middle, low]


def test_who_leaves_is_gone_and_costs_its_tenant_no_turn():
    """An abort is no service: the tenant's next one is still the next."""
    first, second, other = Item("a"), Item("a", number=2), Item("b")
    queue = fill(first, second, other)

    queue.remove(first, served=False)

    assert len(queue) == 2
    assert drain(queue) == [second, other]


def test_head_does_not_move():
    """Looking twice is looking once."""
    queue = fill(Item("a"), Item("b"))

    assert queue.head() is queue.head()


def test_item_is_in_the_queue_once():
    """Pushed twice it is served once."""
    item = Item()
    queue = fill(item, item)

    assert drain(queue) == [item]


def test_nobody_waits():
    """Asking an empty queue, or for somebody who is not there, is a mistake."""
    queue = FairQueue()
    with pytest.raises(LookupError):
        queue.head()
    with pytest.raises(KeyError):
        queue.remove(Item(), served=False)


@pytest.mark.slow
@pytest.mark.parametrize("tenants", [1, 100, 20_000])
def test_cost_per_operation_does_not_grow(tenants):
    """20,000 who wait, leave in any order and are served, in well under a second, however many tenants."""
    items = [Item(str(n % tenants), n % 7) for n in range(20_000)]
    started = time.process_time()

    queue = fill(*items)
    for item in items[::3]:
        queue.remove(item, served=False)
    left = drain(queue)

    assert len(left) == 20_000 - len(items[::3])
    assert time.process_time() - started < 2


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-1, 1)),
            st.tuples(st.just("serve")),
            st.tuples(st.just("leave"), st.integers(0, 20)),
        ),
        max_size=60,
    )
)
def test_order_is_kept_after_any_sequence(events):
    """Highest class first, first come first served within a tenant, and each is there until it goes."""
    queue, waiting = FairQueue(), []
    for number, event in enumerate(events):
        match event:
            case ("push", tenant, priority):
                item = Item(tenant, priority, number)
                queue.push(item)
                waiting.append(item)
            case ("serve",) if waiting:
                head = queue.head()
                assert head.priority == max(item.priority for item in waiting)
                same = [
                    i for i in waiting if (i.tenant, i.priority) == (head.tenant, head.priority)
                ]
                assert head is same[0]
                queue.remove(head, served=True)
                waiting.remove(head)
            case ("leave", index) if waiting:
                item = waiting.pop(index % len(waiting))
                queue.remove(item, served=False)
        assert len(queue) == len(waiting)
        assert sorted(i.number for i in queue) == [i.number for i in waiting]


@pytest.mark.parametrize(
    ("waiting", "newcomer", "number"),
    [
        ([("a", 0), ("a", 0), ("b", 0)], ("c", 0), 1),  # the latest of who has the most
        ([("a", 0), ("a", 5), ("a", 0)], ("b", 0), 2),  # the least urgent of them
        ([("a", 5), ("a", 5)], ("b", 0), None),  # all more urgent
        ([("a", 0), ("b", 0)], ("a", 0), None),  # nobody has more
        ([("a", 0), ("a", 0)], ("b", -1), None),
        ([("a", 0), ("a", 0), ("b", 0)], ("b", 0), None),  # that would only turn it round
        ([], ("a", 0), None),
    ],
)
def test_who_yields_to_a_newcomer(waiting, newcomer, number):
    """One of the tenant that has the most, if any."""
    items = [Item(tenant, priority, n) for n, (tenant, priority) in enumerate(waiting)]

    found = fill(*items).yields_to(*newcomer)

    assert (found.number if found else None) == number


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1)), max_size=30))
def test_tenants_that_push_end_with_equal_shares(pushes):
    """However one of them floods a queue that is full."""
    queue = FairQueue()
    for tenant in "a" * 6 + "".join(tenant for tenant, _ in pushes):
        if len(queue) >= 6:
            found = queue.yields_to(tenant, 0)
            if found is None:
                continue
            queue.remove(found, served=False)
        queue.push(Item(tenant))
    shares = Counter(item.tenant for item in queue)

    assert len(queue) == 6
    for tenant in "bc":
        pushed = sum(1 for name, _ in pushes if name == tenant)
        assert shares[tenant] >= min(pushed, 2)
