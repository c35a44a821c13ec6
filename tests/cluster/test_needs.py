"""What is missing is named, with how to get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import image, needs


def test_missing_programs_and_files_lead_to_packages(tmp_path: Path):
    """Files by their paths."""
    wanted = {"sh": "dash", "no-such-program": "one", str(tmp_path): "two", "/no/such": "three"}

    assert needs.missing(wanted) == ["one", "three"]


def test_one_line_installs_all():
    """After what packages cannot help."""
    text = needs.tell(["root is needed"], ["a", "b"])

    assert text.splitlines() == [
        "root is needed",
        "Debian packages are missing: apt-get install --no-install-recommends a b",
    ]
    assert needs.tell([], []) == ""


def test_what_builds_kubernetes_is_needed_only_where_it_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Go is large."""
    monkeypatch.setattr(needs, "is_here", lambda _name: False)

    _, before = needs.local(tmp_path)
    for name in needs.KUBERNETES:
        (tmp_path / name).touch()
    _, after = needs.local(tmp_path)

    assert set(before) - set(after) == set(needs.BUILD.values())
    assert set(after) == set(needs.LOCAL.values())


def test_image_is_made_of_what_the_lock_pins():
    """Every requirement of the router, and of the build."""
    pinned = {line.split("==")[0] for line in image.constraints().splitlines()}

    assert len(pinned) > 50
    for requirement in image.requirements():
        name = requirement.split("=")[0].split(">")[0].split("[")[0].strip()
        assert name in pinned
