"""The worker as a process."""

import argparse
import asyncio
import contextlib
import signal
import sys

import aiohttp
import pytest
import structlog

from extproc.sim.command import CRASHED, add_arguments, build_config, run
from extproc.sim.config import SimConfig
from extproc.sim.faults import Faults
from extproc.sim.kv_config import KvConfig

PROGRAM = (
    "import argparse, sys; from extproc.sim.command import add_arguments, run; "
    "parser = argparse.ArgumentParser(); add_arguments(parser); sys.exit(run(parser.parse_args()))"
)


def parse(*flags):
    """Return the arguments that *flags* give."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture(autouse=True)
def _quiet_structlog():
    """``run`` sets structlog up for a process of its own; that must not outlive the test."""
    yield
    structlog.reset_defaults()


@contextlib.asynccontextmanager
async def process(*flags):
    """Start the command; yield the process and the line it printed."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child, (await asyncio.wait_for(child.stdout.readline(), 20)).decode()
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


def test_no_flags_give_the_defaults():
    """But a port that users know, and a name made of it."""
    assert build_config(parse()) == SimConfig(port=8000, name="sim-8000")


def test_flags_become_settings():
    """Every one of them."""
    flags = (
        "--host ::1 --port 1 --name n --model a b --model c --hardware h200 --speed 0 --kv-blocks 5 "
        "--max-num-seqs 6 --max-num-batched-tokens 7 --max-model-len 8 --itl-ms 9 --ttft-ms 10 "
        "--record 11 --seed 12 --fail-first-n 13 --status-code 514 --random-fail-rate 0.15 "
        "--crash-on-request 16 --stall-after 17 --reset-after 18 --health-status 519 --slowdown 1.5 "
        "--retry-after 23 "
        "--lora-modules x y=/p --lora-modules z --root-path /r --ssl-certfile c.pem --ssl-keyfile k.pem "
        "--role prefill --kv-connector nccl --kv-transfer-mode pull --kv-transfer-mb-per-s 24 "
        "--kv-bytes-per-token 25 --kv-hold-s 26 --kv-host h --kv-port 27 --bootstrap-port 28 "
        "--zmq-address a:29 --discovery-address b:30 "
        "--api-key secret --startup-delay 20 --data-parallel-size 21 --data-parallel-start-rank 22"
    )

    assert build_config(parse(*flags.split())) == SimConfig(
        host="::1",
        port=1,
        name="n",
        models=("a", "b", "c"),
        lora_modules=("x", "y=/p", "z"),
        root_path="/r",
        ssl_certfile="c.pem",
        ssl_keyfile="k.pem",
        api_key="secret",
        startup_delay_s=20,
        data_parallel_size=21,
        data_parallel_start_rank=22,
        hardware="h200",
        speed=0,
        kv_blocks=5,
        max_num_seqs=6,
        max_num_batched_tokens=7,
        max_model_len=8,
        itl_ms=9,
        ttft_ms=10,
        record=11,
        seed=12,
        kv=KvConfig(
            role="prefill",
            connector="nccl",
            transfer_mode="pull",
            transfer_mb_per_s=24,
            bytes_per_token=25,
            hold_s=26,
            host="h",
            port=27,
            bootstrap_port=28,
            zmq_address="a:29",
            discovery_address="b:30",
        ),
        faults=Faults(
            fail_first_n=13,
            status_code=514,
            retry_after_s=23,
            random_fail_rate=0.15,
            crash_on_request=16,
            stall_after=17,
            reset_after=18,
            slowdown=1.5,
            health_status=519,
        ),
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--status-code", "200"], "status_code must be 400 to 599, got 200"),
        (["--name", "Zoë"], "name must be printable ASCII, got 'Zoë'"),
        (["--speed", "-1"], "speed must be >= 0, got -1.0"),
        (["--itl-ms", "-1"], "itl_ms must be >= 0, got -1.0"),
        (["--max-num-seqs", "0"], "max_num_seqs must be >= 1, got 0"),
        (["--kv-blocks", "0"], "kv_blocks must be >= 1, got 0"),
        (["--health-status", "1"], "health_status must be 200 to 599, got 1"),
        (["--data-parallel-size", "0"], "data_parallel_size must be >= 1, got 0"),
        (["--data-parallel-start-rank", "-1"], "data_parallel_start_rank must be >= 0, got -1"),
        (["--startup-delay", "-1"], "startup_delay_s must be >= 0, got -1.0"),
        (["--root-path", "x"], "root_path must start with / and not end so, got 'x'"),
        (["--root-path", "/x/"], "root_path must start with / and not end so, got '/x/'"),
        (["--ssl-keyfile", "k"], "ssl_keyfile needs ssl_certfile"),
        (["--kv-hold-s", "0"], "kv hold_s must be > 0, got 0.0"),
        (["--kv-port", "65536"], "kv port must be 0 to 65535, got 65536"),
        (["--kv-bytes-per-token", "0"], "kv bytes_per_token must be >= 1, got 0"),
        (["--kv-transfer-mb-per-s", "-1"], "kv transfer_mb_per_s must be >= 0, got -1.0"),
        (["--zmq-address", "a:1"], "zmq_address needs the connector nccl"),
        (
            ["--kv-connector", "nccl", "--zmq-address", "a"],
            "zmq_address must be host:port, got 'a'",
        ),
        (
            ["--kv-connector", "nccl", "--discovery-address", "a:1"],
            "discovery_address needs the role prefill or decode",
        ),
        (
            ["--kv-connector", "mooncake", "--kv-transfer-mode", "push"],
            "kv transfer_mode push needs the connector nixl",
        ),
        (["--api-key", ""], "api_key must not be empty"),
        (
            ["--lora-modules", "sim-model"],
            "lora_modules must be NAME or NAME=PATH with a name of its own, got 'sim-model'",
        ),
        (
            ["--lora-modules", "=/p"],
            "lora_modules must be NAME or NAME=PATH with a name of its own, got '=/p'",
        ),
    ],
)
def test_impossible_flags_are_one_line_and_exit_1(flags, message, capsys):
    """Nothing is started."""
    assert run(parse(*flags)) == 1
    assert capsys.readouterr().err == f"sim-worker: {message}\n"


def test_unknown_hardware_and_no_model_are_refused():
    """The configuration checks itself, whoever makes it."""
    with pytest.raises(ValueError, match="hardware 'tpu' is not known; known: h100, h200"):
        SimConfig(hardware="tpu")
    with pytest.raises(ValueError, match="kv role 'x' is not known; known: prefill, decode, both"):
        KvConfig(role="x")
    with pytest.raises(ValueError, match="at least one model"):
        SimConfig(models=())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_it_with_exit_0(number, http, chat_body):
    """Even with a stream open; nothing is printed but the line that it is ready."""
    async with process("--name", "w7", "--itl-ms", "60000", "--ttft-ms", "0") as (child, line):
        url = line.strip().removeprefix("sim-worker w7 ready on ")
        body = chat_body(stream=True)
        async with http.post(url + "/v1/chat/completions", json=body) as stream:
            assert stream.headers["x-sim-worker"] == "w7"
            await stream.content.readline()

            child.send_signal(number)

            output, errors = await asyncio.wait_for(child.communicate(), 10)
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
    assert (child.returncode, output, errors) == (0, b"", b"")


@pytest.mark.slow
async def test_a_port_in_use_is_one_line_and_exit_1(worker):
    """The line names the address."""
    async with process("--port", str(worker.port)) as (child, line):
        assert line == ""
        _, errors = await asyncio.wait_for(child.communicate(), 10)

    assert child.returncode == 1
    assert errors.decode() == (
        f"sim-worker: cannot listen on 127.0.0.1:{worker.port}: Address already in use\n"
    )


@pytest.mark.slow
async def test_a_crash_ends_the_process(http, chat_body):
    """The client sees its connection reset, the parent an exit status."""
    async with process("--crash-on-request", "1") as (child, line):
        url = line.split()[-1]
        with pytest.raises(aiohttp.ClientOSError):
            await http.post(url + "/v1/chat/completions", json=chat_body())
        await asyncio.wait_for(child.wait(), 10)

    assert child.returncode == CRASHED


@pytest.mark.slow
async def test_a_certificate_that_is_missing_is_one_line_and_exit_1():
    """The line names the file."""
    async with process("--ssl-certfile", "/missing.pem") as (child, line):
        assert line == ""
        _, errors = await asyncio.wait_for(child.communicate(), 10)

    assert child.returncode == 1
    assert errors.decode() == (
        "sim-worker: cannot use the certificate '/missing.pem': No such file or directory\n"
    )


@pytest.mark.slow
async def test_the_line_says_https_and_the_base_path(http, chat_body, certificate, trust):
    """It is the URL to configure; a stop with a stream open is as clean as without TLS."""
    flags = ("--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1])
    slow = ("--itl-ms", "60000", "--ttft-ms", "0")
    async with process("--name", "w7", "--root-path", "/x", *flags, *slow) as (child, line):
        url = line.strip().removeprefix("sim-worker w7 ready on ")
        assert url.startswith("https://127.0.0.1:")
        assert url.endswith("/x")
        ask = http.post(url + "/v1/chat/completions", json=chat_body(stream=True), ssl=trust)
        async with ask as stream:
            await stream.content.readline()

            child.terminate()

            output, errors = await asyncio.wait_for(child.communicate(), 10)
            with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
                await stream.read()
    assert (child.returncode, output, errors) == (0, b"", b"")


@pytest.mark.slow
async def test_two_processes_hand_kv_over(http):
    """Each in its role, at an address of its own; both end cleanly with blocks still kept."""
    ask = {"prompt": "x" * 200, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    flags = ("--speed", "0", "--role")
    async with (
        process(*flags, "prefill", "--kv-host", "127.0.0.2") as (first, first_line),
        process(*flags, "decode") as (second, second_line),
    ):
        prefill, decode = (
            line.split()[-1] + "/v1/completions" for line in (first_line, second_line)
        )
        for _ in range(2):
            params = (await (await http.post(prefill, json=ask)).json())["kv_transfer_params"]
        assert params["remote_host"] == "127.0.0.2"

        answer = await http.post(
            decode, json={"prompt": "x" * 200, "max_tokens": 9, "kv_transfer_params": params}
        )

        assert answer.status == 200
        for child in (first, second):
            child.terminate()
            output, errors = await asyncio.wait_for(child.communicate(), 10)
            assert (child.returncode, output, errors) == (0, b"", b"")


@pytest.mark.slow
async def test_a_side_channel_port_in_use_is_one_line_and_exit_1(worker):
    """The line names it."""
    async with process("--kv-port", str(worker.port)) as (child, line):
        assert line == ""
        _, errors = await asyncio.wait_for(child.communicate(), 10)

    assert child.returncode == 1
    assert errors.decode() == (
        f"sim-worker: cannot listen on 127.0.0.1:{worker.port} (kv port): Address already in use\n"
    )
