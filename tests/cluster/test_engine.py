"""The stand-in for vLLM: what the chart's engines become."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helm.chart import CHART, pod_specs

ENGINE = Path(__file__).parent / "engine" / "vllm"


def started(tmp_path: Path, *arguments: str, **variables: str) -> list[str]:
    """Return the arguments that the simulated worker gets."""
    program = tmp_path / "vllm-extproc"
    program.write_text('#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(ENGINE), *arguments],
        env={"PATH": path, "HOSTNAME": "pod-0", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("kv_role", "role"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("", "both")]
)
def test_engine_takes_its_role_from_the_kv_connector(tmp_path: Path, kv_role, role):
    """Other arguments are passed on as they are, spaces included."""
    config = f'--kv-transfer-config={{"kv_connector":"NixlConnector","kv_role":"{kv_role}"}}'
    wanted = ["serve", "a model", "--host=0.0.0.0", *([config] if kv_role else []), "--port=8000"]

    found = started(tmp_path, *wanted, VLLM_NIXL_SIDE_CHANNEL_HOST="10.0.0.1")

    assert found[:3] == ["sim-worker", "--model", "a model"]
    assert found[found.index("--role") + 1] == role
    assert found[found.index("--kv-host") + 1] == "10.0.0.1"
    assert found[found.index("--name") + 1] == "pod-0"
    assert found[-2:] == ["--host=0.0.0.0", "--port=8000"]


@pytest.mark.helm
@pytest.mark.slow
def test_arguments_of_the_preset_are_understood(helm, tmp_path: Path):
    """Prefill and decode as the chart starts them."""
    objects = helm.render("-f", str(CHART / "values-pd.yaml"), "--set", "vllm.enabled=true")
    roles = []
    for _, spec in pod_specs(objects):
        for found in spec["containers"]:
            if found["name"] == "vllm":
                assert found["command"] == ["vllm", "serve"]
                got = started(tmp_path, "serve", *found["args"])
                roles.append(got[got.index("--role") + 1])

    assert sorted(roles) == ["decode", "prefill"]


def test_only_serve_is_simulated():
    """What else vLLM can is an error."""
    done = subprocess.run([str(ENGINE), "bench"], capture_output=True, text=True, check=False)

    assert (done.returncode, "only 'serve'" in done.stderr) == (2, True)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_script_is_read_by_any_shell(shell):
    """Its grammar at least."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    assert subprocess.run([shell, "-n", str(ENGINE)], check=False).returncode == 0
