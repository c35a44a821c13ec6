"""``drain`` without an Envoy: whom it waits for. With one: ``tests/helm/test_drain.py``."""

from __future__ import annotations

import pytest

from extproc.config import Config
from extproc.drain_command import DRAINED, ENVOY_STOPS, SERVICE_STOPS, drain
from extproc.errors import ConfigError

MEET_S = 0.2


def beside_envoy(tmp_path, **options):
    return Config(envoy_admin_address=f"unix:{tmp_path}/none.sock", **options)


async def test_container_that_is_restarted_alone_drains_nothing(tmp_path):
    """Envoy goes on: it is not asked anything, and no file is left that would mislead the next time."""
    drained = await drain(beside_envoy(tmp_path), tmp_path, None, meet_s=MEET_S)

    assert not drained
    assert list(tmp_path.iterdir()) == []


async def test_envoy_that_does_not_answer_is_given_up_with_the_grace_time(tmp_path):
    """Envoy's container is told, so that it does not wait for ever."""
    (tmp_path / ENVOY_STOPS).touch()
    config = beside_envoy(tmp_path, shutdown_delay_s=0, shutdown_grace_s=0)

    drained = await drain(config, tmp_path, None, meet_s=MEET_S)

    assert drained
    assert {path.name for path in tmp_path.iterdir()} == {ENVOY_STOPS, SERVICE_STOPS, DRAINED}


async def test_drain_needs_to_know_envoy(tmp_path):
    """A sentence, before anything is done."""
    with pytest.raises(ConfigError, match="envoy_admin_address: must be given"):
        await drain(Config(), tmp_path, None)
