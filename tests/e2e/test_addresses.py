"""Workers and listeners by IPv4, IPv6 and name."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.e2e.client import ask
from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Sim, has_ipv6

pytestmark = pytest.mark.envoy

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="needs ::1 (sysctl disable_ipv6=0)")

StartSim = Callable[..., Sim]


@needs_ipv6
async def test_ipv6_listener_and_worker(start_router: StartRouter, start_sim: StartSim) -> None:
    """Both ends of the router speak IPv6; the worker is known by its URL."""
    sim = start_sim(host="::1")
    router = start_router([sim.url], host="::1")

    for _ in range(3):
        response = await ask(router.port, "GET", "/version", host="::1")
        assert response.status == 200
        assert response.values("x-sim-worker") == [sim.worker_name]

    assert router.base_url.startswith("http://[::1]:")
    assert router.logged("router ready", url=router.base_url)
    assert router.metrics()("workers") == 1
    assert router.metrics()("decisions_total", result="routed") == 3
    assert f'worker="{sim.url}"' in router.metrics().text


@needs_ipv6
async def test_workers_of_both_families(start_router: StartRouter, start_sim: StartSim) -> None:
    """They take turns, in whatever form their address is written; the router listens everywhere."""
    four, six = start_sim(), start_sim(host="::1")
    long_form = f"http://[0:0:0:0:0:0:0:1]:{six.port}"
    router = start_router([four.url, long_form], "--policy", "round_robin", host="0.0.0.0")

    served = [
        (await ask(router.port, "GET", "/version")).values("x-sim-worker")[0] for _ in range(4)
    ]

    assert sorted(served) == sorted([four.worker_name, six.worker_name] * 2)


async def test_workers_by_name(start_router: StartRouter, start_sim: StartSim) -> None:
    """``localhost``, and the name of this machine if it stands for a loopback address, in any case."""
    first = start_sim()
    urls = [f"http://LocalHost:{first.port}"]
    names = {first.worker_name}
    host = socket.gethostname()
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, socket.AF_INET)}
    except OSError:
        addresses = set()
    if addresses == {"127.0.0.1"}:
        second = start_sim()
        urls.append(f"http://{host.upper()}:{second.port}")
        names.add(second.worker_name)
    router = start_router(urls, "--policy", "round_robin", host="localhost")

    served = {
        (await ask(router.port, "GET", "/version")).values("x-sim-worker")[0] for _ in range(4)
    }

    assert served == names
    for url in map(str.lower, urls):
        assert router.metrics()("worker_in_flight", worker=url) == 0
        assert f'worker="{url}"' in router.metrics().text
