"""Real vLLM engines on the CPU; ``make test-vllm`` installs vLLM into an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Program, free_port, http_get, wait_until

PYTHON = os.environ.get("VLLM_PYTHON", "")
MODEL = "tiny"
START_LIMIT_S = 240
TEST_LIMIT_S = 600
ILLEGAL_INSTRUCTION = "exit code: -4"
"""What vLLM logs of a worker that died of SIGILL."""


QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.envoy)
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))
            if not PYTHON:
                item.add_marker(pytest.mark.skip(reason="needs vLLM on the CPU: make test-vllm"))


class Engine(Program):
    """One vLLM engine with the NIXL connector."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        transfers = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        }
        command = [
            *(PYTHON, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", MODEL, "--dtype", "bfloat16"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", "2048", "--enforce-eager", "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(64 * 2**20)),
            *("--enable-prompt-tokens-details", "--enable-request-id-headers"),
            *("--kv-transfer-config", json.dumps(transfers)),
        ]
        environment = {**os.environ, **QUIET, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        super().__init__(f"vllm-{self.port}", command, directory, env=environment)

    def until_ready(self) -> Engine:
        """Wait until it serves."""

        def ready() -> bool:
            assert self.running, self.describe()
            try:
                return http_get(f"{self.url}/health")[0] == 200
            except OSError:
                return False

        wait_until(ready, START_LIMIT_S, "vLLM serves")
        return self


def post(engine: Engine, body: dict[str, Any]) -> tuple[int, bytes]:
    """Ask for a completion; return status and body, 0 and nothing when there is no answer."""
    request = urllib.request.Request(  # noqa: S310  of our own
        f"{engine.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=180) as response:  # noqa: S310
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


def check_transfers(prefill: Engine, decode: Engine) -> None:
    """Skip the tests where NIXL itself dies, without any router: of instructions that the CPU does not have."""
    leg = {"do_remote_decode": True, "do_remote_prefill": False}
    leg |= {"remote_engine_id": None, "remote_block_ids": None}
    leg |= {"remote_host": None, "remote_port": None}
    prompt = "One worker reads, another one writes. " * 4
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    _, answer = post(prefill, body | {"kv_transfer_params": leg})
    params = json.loads(answer)["kv_transfer_params"]
    status, _ = post(decode, body | {"kv_transfer_params": params})
    served = status == 200
    if not served and ILLEGAL_INSTRUCTION in decode.stdout + decode.stderr:
        pytest.skip("NIXL's transfers need instructions that this CPU does not have (SIGILL)")
    assert served, decode.describe()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model."""
    directory = tmp_path_factory.mktemp("model")
    script = Path(__file__).with_name("tiny_model.py")
    subprocess.run([PYTHON, str(script), str(directory)], check=True, timeout=300)
    return directory


@pytest.fixture(scope="session")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that can prefill for each other."""
    logs = tmp_path_factory.mktemp("engines")
    engines: list[Engine] = []
    try:
        for _ in range(2):
            engines.append(Engine(logs, model))  # noqa: PERF401  what has started must be ended
        first, second = (engine.until_ready() for engine in engines)
        check_transfers(first, second)
        yield first, second
    finally:
        for engine in engines:
            engine.end()
