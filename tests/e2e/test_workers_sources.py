"""Workers from a file that changes, and from names."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import StartRouter
from tests.e2e.harness import Program, Router, free_port, until
from tests.e2e.workers_support import (
    CHAT_PATH,
    FAST,
    ROUND_ROBIN,
    STREAM_BODY,
    AdminApi,
    StartWorker,
    chats,
    hold_streams,
    rest_of,
    stream_on,
    until_ended,
)

pytestmark = pytest.mark.envoy

START_LIMIT_S = 30
BROKEN = "worker file cannot be used; the last good one stays"


def _replace(path: Path, text: str) -> None:
    """Write beside *path* and rename, as careful programs do."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def _said(router: Router, event: str, count: int) -> Callable[[], bool]:
    return lambda: len(router.logged(event)) >= count


async def test_worker_file_is_followed(
    tmp_path: Path, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Workers are added, described anew and removed; a broken file changes nothing, and the log says why."""
    worker = start_worker(2)
    first, second = worker.urls
    go_on = hold_streams(worker)
    path = tmp_path / "workers.yaml"
    path.write_text(f"- {first}\n")
    router = start_router([], *FAST, *ROUND_ROBIN, "--worker-file", str(path), workers=1)
    api = AdminApi(router)
    alone = await chats(router, 2)

    _replace(path, f"- {first}\n- {{url: '{second}', weight: 2, labels: {{zone: b}}}}\n")
    api.until_states({first: "healthy", second: "healthy"})
    entry = api.worker(second)
    both = await chats(router, 6)

    path.write_text(f"- {first}\n- {second}:\n- {{url")
    await until(_said(router, BROKEN, 1), 10, "said to be broken")
    path.write_text(f"- {first}\n- http://user:hunter2@127.0.0.1:1\n")
    await until(_said(router, BROKEN, 2), 10, "said to be wrong")
    path.unlink()
    await until(_said(router, BROKEN, 3), 10, "said to be missing")
    kept = api.states()
    still = await chats(router, 6)

    async with stream_on(router, worker.ports[0]) as connection:
        _replace(path, json.dumps({"workers": [second]}))
        await until(lambda: api.states() == {second: "healthy"}, 10, "removed")
        without = await chats(router, 4)
        go_on.set()
        body = await rest_of(connection)

    one, two = map(str, worker.ports)
    assert alone == {one: 2}
    assert (entry["source"], entry["weight"], entry["labels"]) == ("file", 2, {"zone": "b"})
    assert both == still == {one: 2, two: 4}
    assert kept == {first: "healthy", second: "healthy"}
    yaml, url, missing = (entry["reason"] for entry in router.logged(BROKEN))
    assert "not YAML" in yaml
    assert "password" in url
    assert "No such file" in missing
    assert all(str(path) in reason for reason in (yaml, url, missing))
    assert "hunter2" not in router.stderr
    assert router.logged("worker file can be used again")
    assert without == {two: 4}
    assert body == STREAM_BODY
    await until_ended(router)


async def test_worker_file_of_a_config_map(
    tmp_path: Path, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Kubernetes swaps a symbolic link to a directory; the file itself is never written to.

    What an administrator removes stays away until the file no longer names it, and then does again.
    """
    worker = start_worker(3)
    first, second, third = worker.urls
    mount = tmp_path / "mount"
    mount.mkdir()
    versions = itertools.count(1)

    def publish(*described: object) -> None:
        data = mount / f"..{next(versions)}"
        data.mkdir()
        (data / "workers.json").write_text(json.dumps(described))
        fresh = mount / "..data_tmp"
        fresh.symlink_to(data.name)
        fresh.replace(mount / "..data")

    publish(first)
    path = mount / "workers.json"
    path.symlink_to("..data/workers.json")
    router = start_router([third], *FAST, *ROUND_ROBIN, "--worker-file", str(path), workers=2)
    api = AdminApi(router)

    def labels() -> dict[str, str]:
        entry = api.workers().get(second)
        return {} if entry is None else entry["labels"]

    async def read_again(*described: object, mark: str) -> None:
        publish(*described, {"url": second, "labels": {"mark": mark}})
        await until(lambda: labels() == {"mark": mark}, 10, "read again")

    await read_again(mark="1")
    swapped = api.states().keys()
    await read_again(first, mark="2")
    api.until_states(dict.fromkeys(worker.urls, "healthy"))
    served = await chats(router, 6)
    removed = api.remove(first)
    await read_again(first, mark="3")
    away = api.states().keys()
    await read_again(mark="4")
    await read_again(first, mark="5")
    api.until_states(dict.fromkeys(worker.urls, "healthy"))

    assert swapped == away == {second, third}
    assert served == {str(port): 2 for port in worker.ports}
    assert removed.status == 200
    assert router.logged(BROKEN) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["No such file"]),
        (b"- [", ["not YAML"]),
        (b"- http://127.0.0.1:0\n", ["workers[0]", "port"]),
    ],
    ids=["missing", "broken", "wrong"],
)
def test_router_does_not_start_without_its_worker_file(
    tmp_path: Path, content: bytes | None, words: list[str]
) -> None:
    """Status 1 and one line that names the file and what is wrong with it."""
    path = tmp_path / "workers.yaml"
    if content is not None:
        path.write_bytes(content)
    ports = ("--port", str(free_port()), "--prometheus-port", str(free_port()))
    command = [sys.executable, "-m", "extproc", "launch", *ports, "--worker-file", str(path)]
    program = Program("launch", command, tmp_path)
    try:
        status = program.wait(START_LIMIT_S)
        program.check_nothing_left()
    finally:
        program.end()

    assert status == 1
    (line,) = program.stderr.splitlines()
    assert "Traceback" not in line
    for word in (str(path), *words):
        assert word in line


# --- names


def _local_addresses() -> set[str]:
    found = socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
    return {str(info[4][0]) for info in found}


async def test_names(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Every address of ``--worker-dns`` is a worker; a name among ``--worker-urls`` is one, asked under it.

    Names without an address delay nobody.
    """
    worker = start_worker(3)
    first, second, third = worker.ports
    named, nobody = f"http://localhost:{third}", "http://no-such-name.invalid:8000"
    router = start_router(
        [nobody, named],
        *FAST,
        *ROUND_ROBIN,
        *("--worker-dns", f"http://localhost:{first}", f"http://localhost:{second}"),
        "http://neither.invalid:8000",
        workers=3,
    )
    api = AdminApi(router)

    served = await chats(router, 6)
    entries = api.workers()
    twin = api.add(f"http://127.0.0.1:{third}")

    found = set()
    for address in _local_addresses():
        host = f"[{address}]" if ":" in address else address
        found |= {f"http://{host}:{port}" for port in (first, second)}
    assert entries.keys() == {nobody, named} | found
    assert served == {str(port): 2 for port in worker.ports}
    healthy = {named, f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"}
    assert {url for url, entry in entries.items() if entry["is_healthy"]} == healthy
    sources = {url: entry["source"] for url, entry in entries.items()}
    assert sources[f"http://127.0.0.1:{first}"] == f"dns http://localhost:{first}"
    assert sources[named] == "static"
    assert entries[named]["endpoint"] == f"127.0.0.1:{third}"
    hosts = {
        port: {r.values("host")[0] for r in worker.received(CHAT_PATH) if r.port == port}
        for port in worker.ports
    }
    assert {host.partition(":")[0] for host in hosts[third]} == {"localhost"}
    assert hosts[first] == {"router.test"}, "the client's own"
    assert (entries[nobody]["endpoint"], entries[nobody]["state"]) == (None, "starting")
    assert entries[nobody]["reason"]
    assert twin.status == 400
    assert "same address" in twin.json()["error"]
