"""``drain``: what the service's container does before its Pod ends, while Envoy runs in a container beside it.

Kubernetes tells all containers of a Pod at the same moment (``preStop``) and cannot be told an order. So they
meet through files in the directory that both mount:

* each leaves a file that says it is asked to stop, and looks for that of the other. A container that is
  restarted alone, for a failed liveness probe, does not find it and ends at once: Envoy goes on, and so does
  its listener;
* this program makes ``/readiness`` fail, waits until load balancers have looked elsewhere, closes Envoy's
  listener, waits for the last request and leaves a third file, for which Envoy's container waits.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import structlog

from extproc.address import Address
from extproc.config import Config
from extproc.envoy_admin import EnvoyAdmin
from extproc.envoy_drain import close_and_wait
from extproc.errors import ConfigError
from extproc.stop import STEP_DOWN

ENVOY_STOPS = "envoy-stops"
SERVICE_STOPS = "service-stops"
DRAINED = "drained"

MEET_S = 5.0
"""How long one container waits for the other's file; both are asked within milliseconds, but may be slow to start."""

POLL_S = 0.05

log = structlog.get_logger(__name__)


async def drain(
    config: Config, directory: Path, service_pid: int | None, meet_s: float = MEET_S
) -> bool:
    """Drain Envoy if its container is asked to stop as well; tell whether it was."""
    if not config.envoy_admin_address:
        raise ConfigError("envoy_admin_address: must be given, Envoy is asked there to drain")
    mine = directory / SERVICE_STOPS
    mine.touch()
    deadline = time.monotonic() + meet_s
    while not (directory / ENVOY_STOPS).exists():
        if time.monotonic() >= deadline:
            mine.unlink(missing_ok=True)
            log.info("envoy goes on; nothing to drain")
            return False
        await asyncio.sleep(POLL_S)
    if service_pid is not None:
        os.kill(service_pid, STEP_DOWN)
    log.info("router stopping", delay_s=config.shutdown_delay_s, grace_s=config.shutdown_grace_s)
    await asyncio.sleep(config.shutdown_delay_s)
    end = time.monotonic() + config.shutdown_grace_s
    admin = EnvoyAdmin(Address.parse(config.envoy_admin_address))
    active = await close_and_wait(admin, lambda: time.monotonic() < end)
    if active != 0:
        log.warning("requests cut at the end of the grace time", active_requests=active)
    (directory / DRAINED).touch()
    return True


def run(config: Config, directory: Path, service_pid: int | None) -> int:
    """Drain; return the exit status."""
    asyncio.run(drain(config, directory, service_pid))
    return 0
