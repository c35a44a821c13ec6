"""Limits of the operating system that a router must not run into."""

from __future__ import annotations

import resource

BACKLOG = 1024
"""Connections that wait to be accepted."""


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, for this process and its children.

    Every stream takes two in Envoy; the usual soft limit of 1024 would fail the 500th.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
