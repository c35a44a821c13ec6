"""Fixtures of the end-to-end tests: routers with a real Envoy, and workers.

Routers that tests only send requests through live for the session; a test that kills, stops or
counts has one of its own (``start_router``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import Router, Sim
from tests.e2e.raw_worker import RawWorker

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024

BODY_FLAGS = {
    "headers_only": ("--policy", "round_robin"),
    "buffered": ("--policy", "e2e_body", "--body-mode", "buffered"),
    "full_duplex": ("--policy", "e2e_body", "--body-mode", "full_duplex"),
}
"""How the router decides: by the headers alone, or by the body in either body mode."""


TEST_LIMIT_S = 150
"""A test may be the first that needs the routers of the session, on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))


@pytest.fixture(scope="session", autouse=True)
def _ready_means_ready() -> Iterator[None]:
    """Check at the end that every router accepted connections as soon as it said "router ready".

    The tests wait for routers that do not, so that they fail for their own reasons only.
    """
    yield
    assert harness.refused_when_ready == [], "said to be ready, but refused connections"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    harness.programs[:] = [program for program in harness.programs if program.running]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    report = yield
    if report.failed:
        for program in harness.programs:
            with contextlib.suppress(OSError):
                report.sections.append((program.name, program.describe()))
    return report


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs that live for the session write."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def plugin_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which the policy ``e2e_body`` is installed."""
    site = tmp_path_factory.mktemp("site")
    # By path: importing it would register the policy in this process, for every other test to see.
    shutil.copy(Path(__file__).with_name("body_policy.py"), site / "e2e_body_policy.py")
    info = site / "e2e_body_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: e2e-body-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_extproc.policies]\ne2e_body = e2e_body_policy\n")
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(site), *([inherited] if inherited else [])])}


StartRouter = Callable[..., Router]


@pytest.fixture
def start_router(tmp_path: Path) -> Iterator[StartRouter]:
    """Start routers; at the end each must stop with status 0 and leave nothing behind.

    ``ready=False`` does not wait at all; see ``Router.until_ready`` for the other options.
    """
    routers: list[Router] = []

    def start(
        worker_urls: list[str],
        *flags: str,
        ready: bool = True,
        healthy: bool = True,
        workers: int | None = None,
        **options: Any,
    ) -> Router:
        router = Router(worker_urls, tmp_path, *flags, **options)
        routers.append(router)
        return router.until_ready(healthy=healthy, workers=workers) if ready else router

    try:
        yield start
        for router in routers:
            if router.running:
                router.stop()
    finally:
        for router in routers:
            router.end()


@pytest.fixture
def start_policy_router(
    start_router: StartRouter, worker: RawWorker, plugin_env: dict[str, str]
) -> StartRouter:
    """Start a router before the raw workers that decides as ``BODY_FLAGS`` says."""

    def start(mode: str, *flags: str, urls: list[str] | None = None, **options: Any) -> Router:
        return start_router(
            worker.urls if urls is None else urls,
            *BODY_FLAGS[mode],
            *flags,
            env=plugin_env,
            **options,
        )

    return start


@pytest.fixture
def start_sim(tmp_path: Path) -> Iterator[Callable[..., Sim]]:
    """Start simulated workers."""
    sims: list[Sim] = []

    def start(*flags: str, **options: Any) -> Sim:
        sim = Sim(tmp_path, *flags, **options)
        sims.append(sim)
        return sim.until_ready()

    try:
        yield start
    finally:
        for sim in sims:
            sim.end()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., RawWorker]]:
    """Start raw workers."""
    workers: list[RawWorker] = []

    def start(*arguments: Any, **options: Any) -> RawWorker:
        worker = RawWorker(*arguments, **options)
        workers.append(worker)
        return worker.start()

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture(scope="session")
def worker() -> Iterator[RawWorker]:
    """Two raw workers that live for the session."""
    worker = RawWorker(2).start()
    yield worker
    worker.stop()


@pytest.fixture(scope="session")
def sims(logs: Path) -> Iterator[list[Sim]]:
    """Two simulated workers that live for the session."""
    sims = [Sim(logs, "--itl-ms", "5") for _ in range(2)]
    try:
        yield [sim.until_ready() for sim in sims]
    finally:
        for sim in sims:
            sim.end()


@contextlib.contextmanager
def _session_router(
    worker_urls: list[str], logs: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[Router]:
    router = Router(worker_urls, logs, *flags, env=env)
    try:
        yield router.until_ready()
        router.stop()
    finally:
        router.end()


@pytest.fixture(scope="session")
def sim_router(sims: list[Sim], logs: Path) -> Iterator[Router]:
    """Start a router with default settings, its policy too, before the simulated workers."""
    with _session_router([sim.url for sim in sims], logs) as router:
        yield router


def _policy_router(
    mode: str, worker: RawWorker, logs: Path, env: dict[str, str]
) -> contextlib.AbstractContextManager[Router]:
    flags = (*BODY_FLAGS[mode], "--max-payload-size", str(MAX_PAYLOAD_BYTES))
    return _session_router(worker.urls, logs, *flags, env=env)


@pytest.fixture(scope="session")
def router(worker: RawWorker, logs: Path, plugin_env: dict[str, str]) -> Iterator[Router]:
    """Start a router whose policy reads no bodies before the raw workers."""
    with _policy_router("headers_only", worker, logs, plugin_env) as router:
        yield router


@pytest.fixture(scope="session")
def buffered_router(worker: RawWorker, logs: Path, plugin_env: dict[str, str]) -> Iterator[Router]:
    """Start a router whose policy reads bodies, in body mode BUFFERED."""
    with _policy_router("buffered", worker, logs, plugin_env) as router:
        yield router


@pytest.fixture(scope="session")
def full_duplex_router(
    worker: RawWorker, logs: Path, plugin_env: dict[str, str]
) -> Iterator[Router]:
    """Start a router whose policy reads bodies, in body mode FULL_DUPLEX_STREAMED."""
    with _policy_router("full_duplex", worker, logs, plugin_env) as router:
        yield router


@pytest.fixture(scope="session")
def workerless_router(logs: Path) -> Iterator[Router]:
    """Start a router that knows no worker."""
    with _session_router([], logs) as router:
        yield router


@pytest.fixture(params=list(BODY_FLAGS))
def any_router(request: pytest.FixtureRequest) -> Router:
    """Each of the three routers before the raw workers."""
    name = "router" if request.param == "headers_only" else f"{request.param}_router"
    return request.getfixturevalue(name)
