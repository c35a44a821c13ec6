"""Workers that are known once and for all."""

from __future__ import annotations

import pytest

from extproc.address import WorkerUrl
from extproc.discovery.static import watch
from extproc.discovery.updates import Reset, WorkerSpec


@pytest.mark.parametrize("urls", [["http://b:1", "http://a:1", "http://10.0.0.5:1"], []], ids=len)
async def test_workers_come_at_once_and_that_is_all(urls):
    """One reset in the order given, names as they are; no workers are said to be none."""
    specs = [WorkerSpec(WorkerUrl.parse(url)) for url in urls]

    updates = [update async for update in watch(specs)]

    assert updates == [Reset(tuple(specs))]
