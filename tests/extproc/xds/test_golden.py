"""What Envoy is told, in full, for a few models.

``pytest --update-golden`` writes the files anew and deletes those that belong to no case; read the
difference before it is committed. A case is one ``golden/<case>.in.yaml``.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
import yaml
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment

from extproc.address import Address
from extproc.envoy_binary import find_envoy
from extproc.xds.bootstrap import EnvoyLimits, build_bootstrap, to_yaml
from extproc.xds.cluster import build_clusters
from extproc.xds.endpoint import build_endpoints
from extproc.xds.extensions import build_extensions
from extproc.xds.listener import build_listener
from extproc.xds.model import ClientTls
from extproc.xds.prefill_listener import build_prefill_listener, build_prefill_routes
from extproc.xds.route import build_routes
from extproc.xds.secrets import build_secrets
from extproc.xds.snapshot import TYPES, build_snapshot
from extproc.xds.standalone import build_standalone, plain
from tests.e2e.certificates import Maker
from tests.extproc.xds.models import CASES, GOLDEN, read_model

ROOT = Path(__file__).parents[3]
KINDS = ("clusters", "endpoints", "secrets", "listeners", "extensions", "routes")
"""Parallel to ``TYPES``."""

CA_FILE = Path(__file__).parent / "ca.pem"
GRPC, ENVOY_ADMIN = Address("127.0.0.1", 9002), Address("127.0.0.1", 9901)

pytestmark = pytest.mark.slow  # a listener takes its builders half a second


def build(kind, model):
    splits = model.prefill_address is not None
    match kind:
        case "clusters":
            return build_clusters(model)
        case "endpoints":
            return [ClusterLoadAssignment.parse(build_endpoints(view)) for view in model.clusters]
        case "listeners":
            return [build_listener(model), *([build_prefill_listener(model)] if splits else [])]
        case "routes":
            return [build_routes(model), *([build_prefill_routes(model)] if splits else [])]
        case "secrets":
            return build_secrets(model)
        case "extensions":
            return build_extensions(model)


def text_of(messages):
    return yaml.safe_dump([plain(message) for message in messages], sort_keys=False, width=100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_resources_are_as_in_the_golden_file(case, kind, update_golden):
    """Every field, in words that a person can read."""
    path = GOLDEN / f"{case}.{kind}.yaml"
    text = text_of(build(kind, read_model(case)))
    if update_golden:
        path.write_text(text)

    assert path.read_text() == text


def test_no_golden_file_is_left_over(update_golden):
    """A case that is gone takes its files with it."""
    wanted = {f"{case}.{kind}.yaml" for case in CASES for kind in ("in", *KINDS)}
    stale = [path for path in GOLDEN.iterdir() if path.name not in wanted]
    if update_golden:
        for path in stale:
            path.unlink()
        stale = []

    assert stale == []
    needed = {"default", "fail_closed", "full_duplex", "ipv6", "no_workers"}
    needed |= {"api_keys", "passwords", "signed_tokens", "asked_tokens", "nobody_yet"}
    needed |= {"rates", "rate_per_key", "cors", "cors_all", "worker_key", "keep_authorization"}
    needed |= {"client_tls", "client_mtls"}
    needed |= {"health", "tls", "tls_insecure", "base_paths", "ranks", "pools"}
    needed |= {"resilience", "no_resilience", "pd"}
    assert needed <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_snapshot_holds_what_the_golden_files_show(case):
    """The bytes that Envoy gets over xDS are those of the same builders."""
    model = read_model(case)
    snapshot = build_snapshot(model)

    for type_url, kind in zip(TYPES, KINDS, strict=True):
        resources = snapshot.resources[type_url].by_name
        if kind == "endpoints":
            assert resources == {view.name: build_endpoints(view) for view in model.clusters}
        else:
            assert resources == {m.name: bytes(m) for m in build(kind, model)}


def read_model_here(case, directory):
    """Return the model of *case* with files and directories that are there."""
    model = read_model(case)
    client_tls = model.client_tls
    if client_tls is not None:
        made = Maker(directory).make("router")
        ca_file = str(made.cert) if client_tls.client_ca_file else ""
        client_tls = ClientTls(str(made.cert), str(made.key), ca_file)
    return dataclasses.replace(
        model,
        tls=dataclasses.replace(model.tls, ca_file=str(CA_FILE)),
        events_dir=model.events_dir and str(directory),
        client_tls=client_tls,
    )


def validate(path):
    """Ask Envoy; return its status and words."""
    done = subprocess.run(
        [str(find_envoy()), "--mode", "validate", "--log-level", "warning", "-c", str(path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.envoy
@pytest.mark.parametrize("case", CASES)
def test_envoy_accepts_the_standalone_configuration(case, tmp_path):
    """Listener, routes, clusters and endpoints of every case, in one file."""
    path = tmp_path / "envoy.yaml"
    model = read_model_here(case, tmp_path)
    path.write_text(to_yaml(build_standalone(model, GRPC, ENVOY_ADMIN)))

    status, words = validate(path)

    assert status == 0, words
    # Envoy calls this one filter work in progress.
    assert all("api_key_auth" in line for line in words.splitlines())


@pytest.mark.envoy
@pytest.mark.parametrize("name", ["bootstrap.yaml", "standalone.yaml"])
def test_envoy_accepts_the_shipped_file(name, tmp_path):
    """As it lies in envoy/, but for the directory of its log, without a word of warning."""
    path = tmp_path / name
    path.write_text(
        (ROOT / "envoy" / name).read_text().replace("/var/run/vllm-extproc", str(tmp_path))
    )

    assert validate(path) == (0, "")


@pytest.mark.envoy
@pytest.mark.parametrize("events", ["", "/tmp"])
@pytest.mark.parametrize(
    ("grpc", "admin"),
    [(GRPC, ENVOY_ADMIN), (Address(path="/run/x.sock"), Address(path="/run/y.sock"))],
    ids=["tcp", "unix"],
)
def test_envoy_accepts_the_bootstrap_with_addresses_put_in(grpc, admin, events, tmp_path):
    """Ports or Unix sockets, with a log of ejections or without."""
    path = tmp_path / "envoy.yaml"
    path.write_text(to_yaml(build_bootstrap(grpc, admin, events)))

    assert validate(path) == (0, "")


@pytest.mark.envoy
def test_envoy_accepts_other_limits(tmp_path):
    """They take the place of those in the file, and nothing else does."""
    limits = EnvoyLimits(memory_bytes=123_456_789, connections=321)
    bootstrap = build_bootstrap(GRPC, ENVOY_ADMIN, "", limits)
    path = tmp_path / "envoy.yaml"
    path.write_text(to_yaml(bootstrap))

    shipped = to_yaml(build_bootstrap(GRPC, ENVOY_ADMIN))
    different = set(to_yaml(bootstrap).splitlines()) ^ set(shipped.splitlines())
    values = sorted(line.split(": ")[1] for line in different)
    assert values == ["123456789", "2147483648", "32000", "321"]
    assert validate(path) == (0, "")


@pytest.mark.envoy
def test_validation_would_find_a_mistake(tmp_path):
    """A route to a cluster that is not there is refused, so the tests above can fail."""
    config = build_standalone(read_model("default"), GRPC, ENVOY_ADMIN)
    clusters = config["static_resources"]["clusters"]
    config["static_resources"]["clusters"] = [c for c in clusters if c["name"] != "default"]
    path = tmp_path / "envoy.yaml"
    path.write_text(to_yaml(config))

    status, words = validate(path)

    assert status == 1
    assert "default" in words
