"""Workers that share the name of a model are one group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.model_groups import group_by_models


@pytest.mark.parametrize(
    ("models", "groups"),
    [
        ([], []),
        ([None, None], [0, 0]),
        ([frozenset()], [0]),
        (["a", "a", "a"], [0, 0, 0]),
        (["a", "b", "a"], [0, 1, 0]),
        (["b", "a"], [0, 1]),
        (["ab", "bc", "c"], [0, 0, 0]),
        (["a", "b", "ab"], [0, 0, 0]),
        (["a", "b", "c", "bc", "a"], [0, 1, 1, 1, 0]),
        ([None, "a", "b"], [0, 0, 1]),
        (["a", None, "b", None], [0, 0, 1, 0]),
        (["a", "b", "c", "d", "cd", "bd"], [0, 1, 1, 1, 1, 1]),
    ],
)
def test_groups_are_numbered_by_their_first_worker(models, groups):
    """Shared names join, directly or through others; the unknown are with the first."""
    assert group_by_models([frozenset(names) if names else None for names in models]) == groups


def test_empty_set_of_names_is_as_good_as_none():
    """A worker that serves nothing by name is in group 0 and joins nobody."""
    assert group_by_models([frozenset("a"), frozenset("b"), frozenset()]) == [0, 1, 0]


def reachable(models, start):
    """Return whom *start* shares a name with, directly or through others."""
    found = {start}
    while True:
        names = {name for index in found for name in models[index]}
        grown = {i for i, own in enumerate(models) if own and own & names}
        if grown <= found:
            return found
        found |= grown


names = st.one_of(st.none(), st.frozensets(st.sampled_from("abcdefg"), max_size=3))


@given(st.lists(names, max_size=12))
def test_groups_are_what_sharing_names_reaches(models):
    """Two workers are in one group exactly when a chain of shared names leads from one to the other."""
    groups = group_by_models(models)

    assert len(groups) == len(models)
    seen = [group for group, own in zip(groups, models, strict=True) if own]
    assert list(dict.fromkeys(seen)) == list(range(len(set(seen))))
    for index, own in enumerate(models):
        if own:
            together = {i for i, group in enumerate(groups) if group == groups[index] and models[i]}
            assert together == reachable(models, index)
        else:
            assert groups[index] == 0


@given(st.lists(names, max_size=8), names)
def test_worker_that_joins_renumbers_nobody_before_it(models, latest):
    """Without a merger the groups of the others stay; a merger only ever lowers a number."""
    before, after = group_by_models(models), group_by_models([*models, latest])

    assert all(new <= old for old, new in zip(before, after, strict=False))
