"""Names of policies."""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import ClassVar

import pytest

from policies import registry
from policies.base import Observer, Policy, Request, Worker
from policies.round_robin import RoundRobin


@dataclasses.dataclass(slots=True, kw_only=True)
class First:
    """Pick the first."""

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        return workers[0]


@pytest.fixture(autouse=True)
def _names_as_before(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry.registered()))


def test_builtin_policies_are_known():
    """One a module, under the names of vLLM Router."""
    assert {"random", "round_robin"} <= set(registry.registered())
    assert registry.policy_class("round_robin") is RoundRobin


def test_registered_class_is_found_and_knows_its_name():
    """The decorator gives the class back and sets ``name``."""
    cls = type("First", (First,), {})

    assert registry.register("first")(cls) is cls

    assert registry.policy_class("first") is cls
    assert cls.name == "first"
    assert isinstance(cls(), Policy)
    assert not isinstance(cls(), Observer)


def test_name_taken_by_another_class_is_refused():
    """Two policies under one name would make the choice depend on the order of imports."""
    with pytest.raises(ValueError, match="policy 'random' is registered twice"):
        registry.register("random")(type("Other", (First,), {}))

    assert registry.policy_class("random").__qualname__ == "Random"


def test_same_class_may_register_again():
    """A module that is loaded again is not a clash."""
    module = importlib.import_module("policies.random")

    registry.register("random")(module.Random)

    assert registry.policy_class("random") is module.Random


def test_unknown_name_lists_the_known_ones():
    """Sorted, with the offending name quoted."""
    with pytest.raises(ValueError, match=r"policy 'p2c' is not registered; known: ") as caught:
        registry.policy_class("p2c")

    known = str(caught.value).partition("known: ")[2].split(", ")
    assert known == sorted(registry.registered())


def test_registered_view_cannot_be_changed():
    """Only ``register`` adds a name."""
    with pytest.raises(TypeError):
        registry.registered()["x"] = First


def test_every_module_of_the_package_registers_a_policy():
    """Whatever lies in ``policies/`` beside the contract is a policy of that name."""
    registry.load_builtin()

    for name, cls in registry.registered().items():
        assert sys.modules[cls.__module__].__name__ == cls.__module__
        assert cls.__module__ == f"policies.{name}"


def test_plug_in_is_loaded_through_its_entry_point(monkeypatch, tmp_path):
    """The module that the entry point names is imported, which registers it."""
    (tmp_path / "plug_in.py").write_text(
        "from policies.registry import register\n"
        "@register('plugged')\n"
        "class Plugged:\n"
        "    needs_body = False\n"
        "    def pick(self, request, workers, *, now, rng):\n"
        "        return workers[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = metadata.EntryPoint("plugged", "plug_in", registry.ENTRY_POINT_GROUP)
    asked = []

    def entry_points(**selected):
        asked.append(selected)
        return [entry]

    monkeypatch.setattr(registry, "entry_points", entry_points)

    registry.load_builtin()

    assert asked == [{"group": "vllm_extproc.policies"}]
    assert registry.policy_class("plugged").name == "plugged"
    sys.modules.pop("plug_in")
