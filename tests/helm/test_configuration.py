"""What the chart writes for Envoy and for the service is what these take."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection

import msgspec
import pytest
import yaml

from extproc import __version__
from extproc.cli import build_parser, config_from, main
from extproc.config import SECRETS, Config
from extproc.envoy_binary import find_envoy
from extproc.reload import RELOADABLE
from extproc.xds.bootstrap import read_shipped
from tests.e2e.certificates import Maker
from tests.helm.chart import CHART, PRESETS, ROOT, Helm, container, flags, one, service_config
from tests.helm.test_values import CHOSEN_BY_DISCOVERY
from tests.signed_tokens import jwks

pytestmark = [pytest.mark.helm, pytest.mark.slow]

WITHOUT_SIDECAR = [case for case in PRESETS if case != "sidecar-only"]
OPTIONS = frozenset(Config.__struct_fields__)


def bootstrap(objects):
    return one(objects, "ConfigMap")["data"]["envoy.yaml"]


@pytest.mark.envoy
@pytest.mark.parametrize("case", WITHOUT_SIDECAR)
def test_envoy_takes_its_bootstrap(helm: Helm, case, tmp_path):
    """A real Envoy, with the arguments of its container."""
    objects = helm.render(*PRESETS[case])
    path = tmp_path / "envoy.yaml"
    # The socket of a running Envoy lies in a directory that only the Pod has.
    path.write_text(bootstrap(objects).replace("/var/run/vllm-extproc", str(tmp_path)))
    arguments = container(objects, "envoy")["args"]
    assert arguments[:2] == ["--config-path", "/etc/envoy/envoy.yaml"]

    done = subprocess.run(
        [str(find_envoy()), "--mode", "validate", "--config-path", str(path), *arguments[2:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_bootstrap_is_the_shipped_one_but_for_two_figures(helm: Helm):
    """Memory and connections follow the container; nothing else differs."""
    shipped = read_shipped("bootstrap.yaml").splitlines()
    rendered = bootstrap(helm.render(*PRESETS["everything"])).splitlines()

    changed = [
        (old.strip(), new.strip())
        for old, new in zip(shipped, rendered, strict=True)
        if old.rstrip() != new.rstrip()
    ]
    assert changed == [
        ("max_heap_size_bytes: 2147483648", "max_heap_size_bytes: 1500000000"),
        ("max_active_downstream_connections: 32000", "max_active_downstream_connections: 20000"),
    ]


@pytest.mark.parametrize(
    ("limit", "heap"),
    [
        ("2Gi", 1610612736),
        ("1.5Gi", 1207959552),
        ("512Mi", 402653184),
        ("4G", 3000000000),
        ("1000000000", 750000000),
    ],
)
def test_heap_is_three_quarters_of_the_memory(helm: Helm, limit, heap):
    """Whatever unit the limit has."""
    text = bootstrap(helm.render("--set-string", f"envoy.resources.limits.memory={limit}"))

    monitors = yaml.safe_load(text)["overload_manager"]["resource_monitors"]
    assert monitors[0]["typed_config"]["max_heap_size_bytes"] == heap


@pytest.fixture(scope="session")
def secret_files(tmp_path_factory):
    """Files such as Secrets hold, by the option that names them."""
    directory = tmp_path_factory.mktemp("secrets")
    maker = Maker(directory)
    certificate = maker.make("router")
    keys = directory / "jwks.json"
    keys.write_text(jwks())
    return {
        "jwt_jwks": keys,
        "tls_cert": certificate.cert,
        "tls_key": certificate.key,
        "tls_client_ca": certificate.cert,
        "worker_ca_file": certificate.cert,
    }


@pytest.fixture
def placed(helm: Helm, secret_files, tmp_path, monkeypatch):
    """Write the configuration of a case with its files where they are here; return its path and the flags."""

    def place(case: str, without: Collection[str] = ()) -> tuple[str, list[str]]:
        objects = helm.render(*PRESETS[case])
        config = {k: v for k, v in service_config(objects).items() if k not in without}
        given = [f for f in flags(objects) if option_of(f) not in without]
        for option, value in config.items():
            if str(value).startswith("/etc/"):
                config[option] = str(secret_files[option])
            elif isinstance(value, str):
                config[option] = value.replace("/var/run/vllm-extproc", str(tmp_path))
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        for entry in container(objects, "extproc")["env"]:
            if "secretKeyRef" in entry.get("valueFrom", {}):
                monkeypatch.setenv(entry["name"], "a-key-of-the-tests")
        return str(path), given

    return place


def option_of(flag):
    return flag[2:].partition("=")[0].replace("-", "_")


@pytest.mark.parametrize("case", PRESETS)
def test_service_takes_its_configuration(placed, case):
    """Its file, its flags and the keys in its environment."""
    # Empty where the service can find Pods.
    path, given = placed(case, without=CHOSEN_BY_DISCOVERY - OPTIONS)

    config = config_from(build_parser().parse_args(["serve", "--config", path, *given]))

    assert config.prometheus_host == "0.0.0.0"
    assert bool(config.tls_cert) == bool(config.admin_api_key) == (case == "everything")


@pytest.mark.envoy
@pytest.mark.parametrize("case", PRESETS)
def test_envoy_takes_what_the_service_makes_of_it(placed, case, capsys):
    """By `vllm-extproc check`; there is no API server here, so no Pods are looked for."""
    path, given = placed(case, without=CHOSEN_BY_DISCOVERY)

    status = main(["check", "--config", path, *given])

    said = capsys.readouterr()
    assert status == 0, said.err
    assert "Envoy configuration: valid" in said.out


def test_no_secret_is_in_a_config_map(helm: Helm):
    """Files are named and keys come from the environment; each from a Secret that is there."""
    objects = helm.render(*PRESETS["everything"])

    assert not SECRETS & set(service_config(objects))
    entries = {entry["name"]: entry for entry in container(objects, "extproc")["env"]}
    for name, secret in (
        ("VLLM_EXTPROC_ADMIN_API_KEY", "admin"),
        ("VLLM_EXTPROC_WORKER_API_KEY", "workers"),
    ):
        assert entries[name]["valueFrom"]["secretKeyRef"]["name"] == secret
        assert "value" not in entries[name]
    assert not [o for o in objects if o["kind"] == "Secret"]


def test_paths_of_secrets_are_where_they_are_mounted(helm: Helm):
    """Each file that the configuration names lies in a mounted directory."""
    objects = helm.render(*PRESETS["everything"])
    mounts = {mount["mountPath"] for mount in container(objects, "extproc")["volumeMounts"]}

    paths = {
        name: value
        for name, value in service_config(objects).items()
        if str(value).startswith("/etc/")
    }
    assert set(paths) == {"jwt_jwks", "worker_ca_file", "tls_cert", "tls_key", "tls_client_ca"}
    for path in paths.values():
        assert path.rpartition("/")[0] in mounts


def test_options_that_the_chart_sets_are_options(helm: Helm):
    """In every case; those of the discovery come with it."""
    for case in PRESETS:
        assert set(service_config(helm.render(*PRESETS[case]))) <= OPTIONS | CHOSEN_BY_DISCOVERY


def digest(helm: Helm, *arguments: str) -> str:
    spec = one(helm.render(*arguments), "Deployment")["spec"]["template"]
    return spec["metadata"]["annotations"]["vllm-extproc/restart-digest"]


def test_only_what_needs_a_restart_restarts(helm: Helm):
    """The service follows its file: a rate that changes is no reason to lose what the policy has learnt."""
    before = digest(helm)

    assert "queue_size" in RELOADABLE
    assert digest(helm, "--set", "config.queue_size=7") == before
    assert digest(helm, "--set", "config.policy=random") != before
    assert digest(helm, "--set", "envoy.maxConnections=7") != before
    assert digest(helm, "--set", "discovery.port=9000") != before


def test_static_workers_need_no_rights(helm: Helm):
    """Without the discovery there is no token, and no role."""
    objects = helm.render(
        "--set", "discovery.enabled=false,config.worker_urls={http://10.0.0.5:8000}"
    )

    assert {o["kind"] for o in objects}.isdisjoint({"Role", "ClusterRole", "RoleBinding"})
    assert "token" not in {m["name"] for m in container(objects, "extproc")["volumeMounts"]}
    assert service_config(objects)["worker_urls"] == ["http://10.0.0.5:8000"]
    assert flags(objects) == []


@pytest.mark.parametrize(
    ("settings", "flag", "namespace"),
    [
        ("replicas=2", ["--service-discovery-namespace=fleet"], None),
        ("discovery.namespace=engines", [], "engines"),
        ("discovery.allNamespaces=true", [], None),
    ],
)
def test_namespace_of_the_workers(helm: Helm, settings, flag, namespace):
    """That of the Pod, by the downward API; another; or all."""
    objects = helm.render("--set", settings)

    assert flags(objects) == flag
    assert service_config(objects).get("service_discovery_namespace") == namespace
    (entry,) = [e for e in container(objects, "extproc")["env"] if e["name"] == "POD_NAMESPACE"]
    assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}


def test_chart_has_the_version_of_the_service():
    """The image's tag follows from it."""
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def test_presets_hold_the_router_to_its_own_ranges():
    """An option in a preset is one that the service knows, in its type."""
    for path in CHART.glob("values-*.yaml"):
        config = yaml.safe_load(path.read_text()).get("config", {})
        msgspec.convert(config, Config)


def test_selector_is_set_as_the_docs_say(helm: Helm):
    """Braces make a list of one."""
    (command,) = {
        line.strip()
        for line in (ROOT / "docs" / "helm.md").read_text().splitlines()
        if line.startswith("  --set image.repository")
    }

    objects = helm.render(*shlex.split(command))

    assert service_config(objects)["selector"] == ["app=vllm"]
    image = container(objects, "extproc")["image"]
    assert image == f"registry.example/vllm-extproc:{__version__}"
