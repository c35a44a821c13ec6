"""What Helm says after an installation can be copied into a shell."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from tests.helm.chart import CHART, NAMESPACE, PRESETS, Helm

pytestmark = [pytest.mark.helm, pytest.mark.slow]


def notes(helm: Helm, *arguments: str) -> str:
    """Return the notes, which `helm template` leaves out."""
    done = helm.run(
        *("install", "router", str(CHART), "--namespace", NAMESPACE, "--dry-run=client"),
        *arguments,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]


def commands(text):
    """Return the words of each command: lines that are indented, joined where they go on."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("case", PRESETS)
def test_commands_of_the_notes_are_whole(helm: Helm, case):
    """An address and JSON for curl, for kubectl the namespace and the Service."""
    found = commands(notes(helm, *PRESETS[case]))

    if case == "sidecar-only":
        assert found == []
        return
    forward = next(words for words in found if "port-forward" in words)
    port = "443" if case == "everything" else "80"
    assert forward[:3] == ["kubectl", "--namespace", NAMESPACE]
    assert forward[-2:] == ["service/router-vllm-extproc", f"8080:{port}"]
    curls = [words for words in found if words[0] == "curl"]
    assert len(curls) == 2
    scheme = "https" if case == "everything" else "http"
    for words in curls:
        (url,) = [word for word in words if "://" in word]
        assert url.startswith(f"{scheme}://127.0.0.1:8080/v1/")
        assert ("--insecure" in words) == (scheme == "https")
    body = json.loads(curls[1][curls[1].index("-d") + 1])
    assert set(body) == {"model", "messages"}
    for line in (words for words in found if words):
        assert (
            subprocess.run(["/bin/sh", "-n", "-c", shlex.join(line)], check=False).returncode == 0
        )


def test_notes_show_the_key_when_one_is_asked_for(helm: Helm):
    """By a variable, never the key itself."""
    curls = commands(notes(helm, "--set", "auth.apiKey.existingSecret=clients"))

    for words in curls:
        if words[0] == "curl":
            assert "Authorization: Bearer $API_KEY" in words
