"""Models that were served a moment ago."""

from __future__ import annotations

from extproc.absent_models import MAX_NAMES, AbsentModels


def test_model_is_absent_from_its_removal_until_it_is_served_again():
    """And no other is."""
    absent = AbsentModels(10)
    absent.removed(["a", "b"], 0.0)

    absent.settle(lambda name: name == "b")

    assert "a" in absent
    assert "b" not in absent
    assert "c" not in absent
    absent.settle(lambda _name: True)
    assert not absent


def test_model_is_forgotten_after_its_time():
    """It is not coming back: who asks for it is told so."""
    absent = AbsentModels(10)
    absent.removed(["a"], 0.0)
    absent.removed(["b"], 5.0)

    absent.expire(10.0)

    assert "a" not in absent
    assert "b" in absent
    absent.expire(15.0)
    assert not absent


def test_second_removal_does_not_make_it_wait_longer():
    """The time runs from when it was first gone."""
    absent = AbsentModels(10)
    absent.removed(["a"], 0.0)
    absent.removed(["a"], 9.0)

    absent.expire(10.0)

    assert not absent


def test_nothing_is_remembered_without_a_time():
    """The wait is switched off."""
    absent = AbsentModels()

    absent.removed(["a"], 0.0)

    assert not absent


def test_memory_is_bounded():
    """The longest gone are forgotten first."""
    absent = AbsentModels(10)

    absent.removed((str(n) for n in range(MAX_NAMES + 5)), 0.0)

    assert "4" not in absent
    assert "5" in absent
    assert str(MAX_NAMES + 4) in absent
