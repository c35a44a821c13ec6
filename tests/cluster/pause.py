"""The image of the process that holds a Pod's namespaces: a few lines of C in an archive as `docker save` makes it."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
import tempfile
from pathlib import Path

SOURCE = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
static void reap(int number) { while (waitpid(-1, 0, WNOHANG) > 0); }
int main(void) {
  signal(SIGINT, end);
  signal(SIGTERM, end);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
"""


def write_pause_image(archive: Path, name: str) -> None:
    """Compile it and write it to *archive* as the image *name*."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "pause")
        command = ["gcc", "-O", "-static", "-x", "c", "-", "-o", str(program)]
        subprocess.run(command, input=SOURCE.encode(), check=True)
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as packed:
            packed.add(program, "pause")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as packed:
        for path, content in (
            ("layer.tar", layer.getvalue()),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
