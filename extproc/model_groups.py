"""Which workers belong together: those that serve the same models, by what they say of themselves."""

from __future__ import annotations

from collections.abc import Sequence


def group_by_models(models: Sequence[frozenset[str] | None]) -> list[int]:
    """Return for each worker the number of its group, 0 for the first and so on.

    *models*: the base models that each worker serves, in the order in which workers joined; None where
    that is not known. Workers that share a name, directly or through others, are one group: they serve
    the same model under several names. A worker of which nothing is known is in group 0, with the
    worker that joined first of those that are known.
    """
    parent = list(range(len(models)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first_with: dict[str, int] = {}
    first_with_set: dict[frozenset[str], int] = {}
    for index, names in enumerate(models):
        if not names:
            continue
        same = first_with_set.setdefault(names, index)
        if same != index:  # the usual case: nothing new to learn from its names
            parent[index] = root(same)
            continue
        for name in names:
            other = first_with.setdefault(name, index)
            if other != index:
                low, high = sorted((root(other), root(index)))
                parent[high] = low
    numbers: dict[int, int] = {}
    groups = []
    for index, names in enumerate(models):
        groups.append(numbers.setdefault(root(index), len(numbers)) if names else 0)
    return groups
