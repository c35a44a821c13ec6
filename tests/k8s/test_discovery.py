"""Workers that are Pods, as a real API server tells of them, behind a real Envoy."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import StartRouter
from tests.e2e.harness import START_LIMIT_S, Router, Sim, free_port, http_get, until, wait_until
from tests.e2e.workers_support import (
    FAST,
    ROUND_ROBIN,
    AdminApi,
    StartSim,
    chat,
)
from tests.e2e.workers_support import (
    server as served_by,
)
from tests.k8s.api_server import STRANGER, ApiServer
from tests.k8s.proxy import Proxy

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

LIMIT_S = 10.0
STALL_LIMIT_S = 20.0


def flags(kubeconfig: Path, namespace: str, *more: str, selector: str = "app=vllm") -> list[str]:
    """Return the flags of a router that follows the Pods of a namespace."""
    return [
        *("--service-discovery", "--kubeconfig", str(kubeconfig)),
        *(("--selector", selector) if selector else ()),
        *(("--service-discovery-namespace", namespace) if namespace else ()),
        *FAST,
        *ROUND_ROBIN,
        *more,
    ]


def at(sim: Sim, **annotations: str) -> dict[str, Any]:
    """Return the options of a Pod in which *sim* runs."""
    described = {"vllm-extproc.io/port": str(sim.port)}
    described |= {f"vllm-extproc.io/{name}": text for name, text in annotations.items()}
    return {"ip": sim.host, "annotations": described}


async def until_served_by(router: Router, sim: Sim, limit_s: float = LIMIT_S) -> float:
    """Send requests until *sim* serves one; return the seconds that took."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        answer = await chat(router)
        if answer.status == 200 and served_by(answer) == sim.worker_name:
            return time.monotonic() - began
        await asyncio.sleep(0.005)
    raise AssertionError(f"{sim.worker_name} served nothing within {limit_s} s")


def kubernetes_up(router: Router) -> float:
    return router.metrics()("kubernetes_up")


async def test_a_pod_comes_and_goes(
    server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter, start_sim: StartSim,
) -> None:  # fmt: skip
    """It gets requests while it is ready and has the labels: from within a second, to within 100 ms."""
    sim = start_sim("--speed", "0", host="127.0.0.11")
    pod = server.add_pod(namespace, "a", **at(sim), ready=False)
    router = start_router([], *flags(kubeconfig, namespace), healthy=False)
    api = AdminApi(router)
    wait_until(lambda: router.metrics()("kubernetes_pods", state="not_ready") == 1, LIMIT_S, "seen")
    assert api.workers() == {}
    assert http_get(f"{router.base_url}/readiness")[0] == 503

    pod.set()
    took_s = await until_served_by(router, sim)
    print(f"ready to first request: {took_s:.3f} s")
    assert took_s < 1.0
    entry = api.worker(sim.url)
    assert entry["source"] == "kubernetes"
    assert entry["labels"]["pod"] == "a"

    pod.set(ready=False)
    api.until_states({})
    pod.set()
    api.until_state(sim.url, "healthy")
    pod.describe(labels={"app": None})
    api.until_states({})
    pod.describe(labels={"app": "vllm"})
    api.until_state(sim.url, "healthy")
    pod.set(ready=True, phase="Failed")
    api.until_states({})
    pod.set()
    api.until_state(sim.url, "healthy")
    pod.delete()
    api.until_states({})
    assert kubernetes_up(router) == 1


@pytest.mark.parametrize("grace_s", [0, 30])
async def test_a_deleted_pod_gets_no_new_request(
    grace_s: int, server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter, start_sim: StartSim,
) -> None:  # fmt: skip
    """Whether it is gone at once or has time to end; a stream that is under way there finishes."""
    sims = [start_sim("--itl-ms", "20", host=f"127.0.0.{n}") for n in (12, 13)]
    pods = [
        server.add_pod(namespace, f"p{n}-{grace_s}", **at(sim), node="node-of-nobody")
        for n, sim in enumerate(sims)
    ]
    router = start_router([], *flags(kubeconfig, namespace), healthy=False)
    router.until_workers(2)
    streams = [asyncio.ensure_future(chat(router, tokens=100)) for _ in range(4)]
    await until(lambda: router.in_flight() == 4, LIMIT_S, "streams under way")
    served: list[tuple[float, str]] = []
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            began = time.monotonic()
            answer = await chat(router, tokens=1)
            assert answer.status == 200, answer
            served.append((began, served_by(answer)))

    clients = [asyncio.ensure_future(client()) for _ in range(4)]
    await until(lambda: len({name for _, name in served}) == 2, LIMIT_S, "both serve")
    await asyncio.to_thread(pods[0].delete, grace_s)
    deleted = time.monotonic()
    seen = len(served)
    await until(lambda: len(served) > seen + 50, LIMIT_S, "requests go on")
    stop.set()
    await asyncio.gather(*clients)
    answers = await asyncio.gather(*streams)
    if grace_s:
        pods[0].delete()

    last = max((began for began, name in served if name == sims[0].worker_name), default=deleted)
    print(f"deleted to last request: {last - deleted:.3f} s")
    assert last - deleted < 0.1
    assert max(began for began, _ in served) - deleted > 0.1
    assert sorted(answer.status for answer in answers) == [200] * 4
    assert {served_by(answer) for answer in answers} == {sim.worker_name for sim in sims}


async def test_what_happens_while_the_watch_is_down(
    server: ApiServer, namespace: str, tmp_path: Path, start_router: StartRouter
) -> None:
    """Deletes are not missed: neither when the watch can be taken up again, nor when its version is gone."""
    with Proxy(server.port) as proxy:
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", port=proxy.port)
        pods = [server.add_pod(namespace, f"p{n}", f"127.0.1.{n}") for n in range(1, 4)]
        options = ("--service-discovery-port", str(free_port()))
        router = start_router([], *flags(kubeconfig, namespace, *options), healthy=False)
        api = AdminApi(router)
        port = options[1]

        def hosts() -> set[str]:
            return {url.removeprefix("http://").removesuffix(f":{port}") for url in api.workers()}

        wait_until(lambda: len(hosts()) == 3, LIMIT_S, "three workers")

        proxy.cut()
        wait_until(lambda: kubernetes_up(router) == 0, LIMIT_S, "noticed")
        pods[0].delete()
        server.add_pod(namespace, "p4", "127.0.1.4")
        assert hosts() == {"127.0.1.1", "127.0.1.2", "127.0.1.3"}
        proxy.open()
        wait_until(lambda: hosts() == {"127.0.1.2", "127.0.1.3", "127.0.1.4"}, 30, "caught up")
        assert kubernetes_up(router) == 1

        proxy.cut()
        wait_until(lambda: kubernetes_up(router) == 0, LIMIT_S, "noticed")
        pods[1].delete()
        server.stop()
        server.compact()
        server.start()
        server.add_pod(namespace, "p5", "127.0.1.5")
        proxy.open()
        wait_until(lambda: hosts() == {"127.0.1.3", "127.0.1.4", "127.0.1.5"}, 30, "caught up")


async def test_a_version_that_is_gone(
    server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter
) -> None:
    """A server that was started anew does not know the version of a quiet watch: the Pods are listed anew."""
    pod = server.add_pod(namespace, "a", "127.0.1.21")
    router = start_router([], *flags(kubeconfig, namespace), healthy=False)
    api = AdminApi(router)
    wait_until(lambda: "http://127.0.1.21" in api.workers(), LIMIT_S, "there")
    lists = router.metrics()("kubernetes_requests_total", verb="list", result="ok")

    other = server.namespace("busy")
    for n in range(30):  # so that the watch's version is far behind
        server.add_pod(other, f"busy-{n}")
    server.stop()
    server.compact()
    server.start()
    pod.delete()
    api.until_states({}, limit_s=30)

    metrics = router.metrics()
    assert metrics("kubernetes_requests_total", verb="list", result="ok") > lists
    assert metrics("kubernetes_up") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_api_server_is_away(
    number: int, server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter, start_sim: StartSim
) -> None:  # fmt: skip
    """The workers stay and serve, also when the service is started anew meanwhile; then all goes on."""
    sim = start_sim("--speed", "0", host="127.0.0.14")
    server.add_pod(namespace, f"a{number}", **at(sim))
    router = start_router([], *flags(kubeconfig, namespace), healthy=False)
    router.until_workers(1)
    api = AdminApi(router)

    await asyncio.to_thread(server.stop, number)
    await until(lambda: kubernetes_up(router) == 0, LIMIT_S, "noticed")
    (logged, *_) = router.logged("kubernetes cannot be followed; the last known workers stay")
    assert (logged["level"], logged["option"]) == ("error", "--selector")
    assert (await chat(router)).status == 200
    router.kill_service()
    await api.until_service_answers()
    await until(lambda: api.states() == {sim.url: "healthy"}, LIMIT_S, "remembered")
    assert (await chat(router)).status == 200
    assert kubernetes_up(router) == 0

    server.start()  # not in another thread: with that it would end
    other = start_sim("--speed", "0", host="127.0.0.15")
    server.add_pod(namespace, f"b{number}", **at(other))
    api.until_states({sim.url: "healthy", other.url: "healthy"}, limit_s=40)
    assert kubernetes_up(router) == 1
    assert router.logged("kubernetes can be followed again")


async def test_a_watch_that_hangs(
    server: ApiServer, namespace: str, tmp_path: Path, start_router: StartRouter
) -> None:
    """A connection that is half open says nothing and ends never: it is given up in time."""
    with Proxy(server.port) as proxy:
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", port=proxy.port)
        pod = server.add_pod(namespace, "a", "127.0.1.31")
        options = ("--service-discovery-watch-timeout-secs", "3")
        router = start_router([], *flags(kubeconfig, namespace, *options), healthy=False)
        api = AdminApi(router)
        wait_until(lambda: len(api.workers()) == 1, LIMIT_S, "there")

        proxy.stall()
        pod.delete()
        took_s = wait_until(lambda: api.workers() == {}, STALL_LIMIT_S, "noticed")

        assert took_s < 3 + 5 + 2
        assert router.metrics()("kubernetes_requests_total", verb="watch", result="stalled") == 1


async def test_denied_at_the_start(
    server: ApiServer, kubeconfig: Path, start_router: StartRouter, tmp_path: Path
) -> None:
    """The router ends with a status other than 0, and says what is missing where."""
    nowhere = server.namespace("nowhere")
    stranger = server.kubeconfig(tmp_path / "stranger", STRANGER)
    for path, reason in (
        (kubeconfig, "not allowed to list pods in namespace 'nowhere': pods is forbidden"),
        (stranger, "cannot list pods in namespace 'nowhere': the API server does not know who"),
    ):
        router = start_router([], *flags(path, nowhere), ready=False)
        assert await asyncio.to_thread(router.wait, START_LIMIT_S) == 1
        (entry, *_) = router.logged("service cannot start")
        assert reason in entry["reason"]

    server.allow("list", namespace=nowhere)
    router = start_router([], *flags(kubeconfig, nowhere), ready=False)
    assert await asyncio.to_thread(router.wait, START_LIMIT_S) == 1
    (entry, *_) = router.logged("service cannot start")
    assert "not allowed to watch pods in namespace 'nowhere'" in entry["reason"]


async def test_denied_later(
    server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter
) -> None:
    """The last workers stay, log and metric say why, and it goes on when the right is back."""
    server.add_pod(namespace, "a", "127.0.1.41")
    options = ("--service-discovery-watch-timeout-secs", "1")
    router = start_router([], *flags(kubeconfig, namespace, *options), healthy=False)
    api = AdminApi(router)
    wait_until(lambda: len(api.workers()) == 1, LIMIT_S, "there")

    server.forbid(namespace=namespace)
    wait_until(lambda: kubernetes_up(router) == 0, LIMIT_S, "noticed")
    server.add_pod(namespace, "b", "127.0.1.42")
    (entry, *_) = router.logged("kubernetes cannot be followed; the last known workers stay")
    assert f"pods in namespace {namespace!r}: pods is forbidden" in entry["reason"]
    assert len(api.workers()) == 1
    assert router.metrics()("kubernetes_requests_total", result="denied") >= 1
    assert http_get(f"{router.base_url}/readiness")[0] == 503  # nobody listens at that address

    server.allow("list", "watch", namespace=namespace)
    wait_until(lambda: len(api.workers()) == 2, 30, "found")


async def test_namespaces(
    server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter
) -> None:
    """Only the one that was named; all when none was."""
    other = server.namespace("other-namespace")
    label = {"app": "of-namespaces"}
    server.add_pod(namespace, "a", "127.0.1.51", labels=label)
    server.add_pod(other, "b", "127.0.1.52", labels=label)
    server.add_pod(other, "c", "127.0.1.53", labels={"app": "something-else"})
    one = start_router(
        [], *flags(kubeconfig, namespace, selector="app=of-namespaces"), healthy=False
    )
    wait_until(lambda: one.metrics()("kubernetes_up") == 1, LIMIT_S, "followed")
    assert AdminApi(one).workers().keys() == {"http://127.0.1.51"}

    server.allow("list", "watch")
    try:
        every = start_router(
            [], *flags(kubeconfig, "", selector="app=of-namespaces"), healthy=False
        )
        wait_until(lambda: every.metrics()("kubernetes_up") == 1, LIMIT_S, "followed")
        found = AdminApi(every).workers().keys()
    finally:
        server.forbid()
    assert found == {"http://127.0.1.51", "http://127.0.1.52"}


async def test_roles_addresses_and_annotations(
    server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter
) -> None:
    """Selectors give roles, also when labels change; another address or role is another worker."""
    prefill = server.add_pod(
        namespace, "prefill", "127.0.1.61",
        labels={"app": "vllm", "role": "prefill"}, annotations={"vllm.ai/bootstrap-port": "8998"},
    )  # fmt: skip
    decode = server.add_pod(
        namespace, "decode", "127.0.1.62",
        labels={"app": "vllm", "role": "decode"}, annotations={"vllm-extproc.io/weight": "heavy"},
    )  # fmt: skip
    server.add_pod(namespace, "neither", "127.0.1.63", labels={"app": "vllm"})
    router = start_router(
        [],
        *flags(
            kubeconfig, namespace, "--vllm-pd-disaggregation", selector="",
        ),
        *("--prefill-selector", "app=vllm", "role=prefill"),
        *("--decode-selector", "app=vllm", "role=decode"),
        healthy=False,
    )  # fmt: skip
    api = AdminApi(router)

    def roles() -> dict[str, str]:
        found = api.workers()
        return {url.removeprefix("http://127.0.1."): e["worker_type"] for url, e in found.items()}

    wait_until(lambda: roles() == {"61": "prefill", "62": "decode"}, LIMIT_S, "roles")
    assert api.worker("http://127.0.1.61")["bootstrap_port"] == 8998
    assert api.worker("http://127.0.1.62")["weight"] == 1.0
    (entry,) = router.logged("pod asks for what cannot be")
    assert entry["pod"] == f"{namespace}/decode"
    assert "vllm-extproc.io/weight" in entry["reason"]

    prefill.describe(labels={"role": "decode"})
    wait_until(lambda: roles() == {"61": "decode", "62": "decode"}, LIMIT_S, "another role")
    decode.set(ip="127.0.1.64")
    wait_until(lambda: roles() == {"61": "decode", "64": "decode"}, LIMIT_S, "another address")
    prefill.describe(annotations={"vllm-extproc.io/port": "81", "vllm-extproc.io/model": "m"})
    wait_until(lambda: roles() == {"61:81": "decode", "64": "decode"}, LIMIT_S, "another port")


@pytest.mark.parametrize("pause", ["", "until it is gone"])
async def test_another_pod_at_the_same_address(
    pause: str,
    server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter, start_sim: StartSim
) -> None:  # fmt: skip
    """It starts with nothing of the old one: no requests of that count for it, and it is checked anew."""
    sim = start_sim("--itl-ms", "50", host="127.0.0.16")
    old = server.add_pod(namespace, "old", **at(sim))
    router = start_router([], *flags(kubeconfig, namespace), healthy=False)
    router.until_workers(1)
    api = AdminApi(router)

    def pod_there() -> str:
        return api.workers()[sim.url]["labels"]["pod"]

    stream = asyncio.ensure_future(chat(router, tokens=200))
    await until(lambda: router.in_flight() == 1, LIMIT_S, "under way")

    old.delete()
    if pause:
        await until(lambda: api.states() == {}, LIMIT_S, "gone")
    server.add_pod(namespace, "new", **at(sim))
    await until(lambda: bool(api.workers()) and pod_there() == "new", LIMIT_S, "there")
    await until(lambda: api.states() == {sim.url: "healthy"}, LIMIT_S, "healthy")
    metrics = router.metrics()
    assert (metrics("worker_in_flight"), metrics("in_flight")) == (0, 1)
    assert (await chat(router)).status == 200
    assert (await stream).status == 200
    await until(lambda: router.in_flight() == 0, LIMIT_S, "idle")


async def test_zones(
    server: ApiServer, namespace: str, kubeconfig: Path, start_router: StartRouter
) -> None:
    """Those of Pods count; else that of the node, if it may be read."""
    server.add_node("node-a", "zone-a")
    server.add_pod(namespace, "a", "127.0.1.71", node="node-a")
    options = ("--service-discovery-list-interval-secs", "1")
    zoned = {"vllm-extproc.io/zone": "zone-b"}
    server.add_pod(namespace, "b", "127.0.1.72", node="node-a", annotations=zoned)
    router = start_router([], *flags(kubeconfig, namespace, *options), healthy=False)
    api = AdminApi(router)

    def zones() -> dict[str, str | None]:
        found = api.workers()
        return {url[-2:]: entry["labels"].get("zone") for url, entry in found.items()}

    wait_until(lambda: zones() == {"71": None, "72": "zone-b"}, LIMIT_S, "zones of Pods")
    wait_until(lambda: bool(router.logged("zones of nodes cannot be read; those that Pods name count")), LIMIT_S, "told")  # fmt: skip
    server.allow("get", resource="nodes")
    try:
        wait_until(lambda: zones() == {"71": "zone-a", "72": "zone-b"}, LIMIT_S, "zones of nodes")
    finally:
        server.forbid(resource="nodes")
