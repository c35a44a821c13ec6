"""Fixtures that many tests share, and how this run of pytest is set up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from hypothesis import settings

from extproc.discovery.updates import WorkerSpec
from extproc.pool import Pool
from extproc.registry import Registry
from policies import registry as policies_registry
from policies.base import Policy, Request, Worker
from tests.extproc.recorder import Recorder
from tests.fleets import registry_of, spec_of, urls

# The same examples in every run: a failure is there for everybody, and a green run stays green.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, max_examples=50
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files from what the code makes now, and delete stale ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    # envoy-data-plane is generated in a style that pydantic 2.12 deprecates; it is not ours to mend
    config.addinivalue_line("filterwarnings", "ignore:Using `@model_validator`:DeprecationWarning")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Tell whether golden files are written instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session", autouse=True)
def _default_loop() -> Iterator[None]:
    # looptime asks for the current loop of the thread, which warns when there never was one
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()


@pytest.fixture(scope="session", autouse=True)
def _builtin_policies() -> None:
    policies_registry.load_builtin()


@pytest.fixture
def rng() -> random.Random:
    """Return seeded randomness."""
    return random.Random(20_261)


@pytest.fixture
def get() -> Request:
    """Return a request without a body."""
    return Request(method="GET", path="/v1/models", headers={}, body=b"")


@pytest.fixture
def policy() -> Policy:
    """Return a policy that picks the first candidate and remembers what it was shown."""
    return Recorder()


@pytest.fixture
def specs() -> tuple[WorkerSpec, ...]:
    """Return three workers, as discovery names them."""
    return tuple(spec_of(url) for url in urls(3))


@pytest.fixture
def registry(specs: tuple[WorkerSpec, ...], policy: Policy) -> Registry:
    """Return a registry of the three workers, all healthy."""
    return registry_of(*specs, policy=policy)


@pytest.fixture
def pool(registry: Registry) -> Pool:
    """Return the pool of the three workers."""
    return registry.pools[0]


@pytest.fixture
def workers(pool: Pool) -> tuple[Worker, ...]:
    """Return the three workers in order of joining."""
    return pool.candidates
