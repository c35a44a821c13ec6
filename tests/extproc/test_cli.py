"""The command line, without starting anything but a stand-in for Envoy."""

from __future__ import annotations

import re

import msgspec
import pytest
import yaml

from extproc import __version__, cli, launcher
from extproc import main as service
from extproc.address import Address
from extproc.check import render_envoy_config
from extproc.clusters import ClusterView, EndpointView
from extproc.config import Config
from extproc.envoy_settings import envoy_model
from extproc.registry import DEFAULT_POOL
from extproc.xds.bootstrap import build_bootstrap
from extproc.xds.standalone import build_standalone

COMMANDS = [
    *("launch", "serve", "envoy-config", "check", "drain", "sim-worker", "demo", "workers"),
    "top",
]
OPTIONS = [field.name for field in msgspec.structs.fields(Config)]
ENVOY_ADMIN = Address("127.0.0.1", 9901)


@pytest.fixture
def served(monkeypatch):
    """Return what ``serve`` and ``launch`` were asked to run; they return at once."""
    configs = []

    def run(config, *_):
        configs.append(config)
        return 0

    monkeypatch.setattr(service, "run", run)
    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.setattr(cli.log, "configure", lambda *_: None)
    return configs


@pytest.fixture
def envoy(tmp_path):
    """Make programs that stand in for Envoy: they print, and end with a status."""

    def make(status, text=""):
        path = tmp_path / "envoy"
        path.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit {status}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def file(tmp_path):
    """Write a configuration file with a port and a worker."""
    path = tmp_path / "router.yaml"
    path.write_text("port: 8080\nworker_urls: [http://10.0.0.5:8000]\n")
    return str(path)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_of_every_command_explains_it(capsys, command):
    """Status 0, usage first, a summary; nothing on standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])

    shown = capsys.readouterr()
    assert ended.value.code == 0
    assert shown.out.startswith(f"usage: vllm-extproc {command}".rstrip())
    assert shown.err == ""


def test_help_lists_the_commands(capsys):
    """Each with a word on what it does."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])

    shown = capsys.readouterr().out
    assert re.findall(r"^ +([a-z-]+)\s{2,}[A-Z]", shown, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("command", ["launch", "serve", "envoy-config", "check", "drain", "demo"])
def test_every_option_is_a_flag_with_its_default_in_the_help(capsys, command):
    """One flag a field, under the same name, with meaning and default."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])

    shown = " ".join(capsys.readouterr().out.split())
    assert [name for name in OPTIONS if f"--{name.replace('_', '-')}" not in shown] == []
    assert "Port on which Envoy serves clients. Default: 30000." in shown
    assert "a larger one gets 413. Default: 536870912." in shown


def test_version_is_printed(capsys):
    """The name of the program and the version of the package."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vllm-extproc {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["serve", "--prot", "1"],
        ["serve", "--port", "many"],
        ["serve", "--port"],
        ["serve", "--log-level", "loud"],
        ["serve", "--body-mode", "x"],
        ["serve", "--dp-rank-offset", "x"],
        ["serve", "--when-none-healthy", "wait"],
        ["workers"],
        ["serve", "stray"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_status_2(capsys, arguments):
    """As is the custom; the usage is shown on standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)

    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: vllm-extproc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "p2c"], "policy 'p2c' is not registered"),
        (["--port", "0"], "--port: Expected `int` >= 1"),
        (["--request-timeout-secs", "nan"], "--request-timeout-secs: "),
        (["--request-timeout-secs", "inf"], "--request-timeout-secs: "),
        (["--host", "example.com"], "--host: expected an IP address"),
        (["--worker-urls", "https://"], "expected http://host:port or https://host:port"),
        (["--model-alias", "gpt-4"], "--model-aliases: expected ALIAS=MODEL, got 'gpt-4'"),
        (["--health-check-interval-secs", "0"], "--health-check-interval-secs: "),
        (["--worker-urls", "http://a", "http://a"], "is given twice"),
        (["--config", "/nonexistent/router.yaml"], "cannot read /nonexistent/router.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", ["launch", "serve", "envoy-config", "check"])
def test_wrong_configuration_ends_with_a_sentence_and_status_1(
    capsys, served, command, arguments, message
):
    """One line that says what is wrong; nothing is started."""
    assert cli.main([command, *arguments]) == 1

    shown = capsys.readouterr()
    assert shown.err.startswith("vllm-extproc: ")
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert served == []


@pytest.mark.parametrize("command", ["serve", "launch"])
def test_flags_become_the_configuration(served, command):
    """Text, numbers, lists and switches arrive in their types."""
    arguments = ["--worker-urls", "http://a:1", "http://b:2", "--port", "1", "--fail-closed"]
    arguments += ["--request-timeout-secs", "2.5", "--policy", "random", "--log-level", "debug"]

    assert cli.main([command, *arguments]) == 0

    assert served == [
        Config(
            worker_urls=("http://a:1", "http://b:2"),
            port=1,
            fail_closed=True,
            request_timeout_secs=2.5,
            policy="random",
            log_level="debug",
        )
    ]


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--worker-urls", "http://a", "--worker-urls", "http://b"], "worker_urls", ("http://a", "http://b")),
        (["--session-header", "x-a", "--session-headers", "x-b", "x-c"], "session_headers", ("x-a", "x-b", "x-c")),
        (["--model-alias", "a=m", "--model-aliases", "b=m", "c=m"], "model_aliases", ("a=m", "b=m", "c=m")),
        (["--worker-dns", "http://workers:8000"], "worker_dns", ("http://workers:8000",)),
        (["--health-failure-threshold", "7"], "health_failure_threshold", 7),
        (["--when-none-healthy", "try"], "when_none_healthy", "try"),
        (["--lora-any"], "lora_any", True),
        (["--intra-node-data-parallel-size", "8"], "intra_node_data_parallel_size", 8),
        (["--dp-rank-offset", "global"], "dp_rank_offset", "global"),
        (["--cache-threshold", "0.25"], "cache_threshold", 0.25),
        (["--balance-abs-threshold", "3"], "balance_abs_threshold", 3),
        (["--hash-fallback", "body"], "hash_fallback", "body"),
        ([], "cache_threshold", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_flag_is_read_in_its_type(served, flags, name, value):
    """Lists may be given at once or one by one; what is not given stays open."""
    assert cli.main(["serve", *flags]) == 0

    assert getattr(served[0], name) == value


@pytest.mark.parametrize(
    ("flags", "port", "fail_closed"),
    [([], 8080, True), (["--port", "1"], 1, True), (["--no-fail-closed"], 8080, False)],
    ids=str,
)
def test_flag_wins_over_the_file(served, tmp_path, flags, port, fail_closed):
    """Also a switch that is turned off again."""
    path = tmp_path / "router.yaml"
    path.write_text("port: 8080\nfail_closed: true\n")

    assert cli.main(["serve", "--config", str(path), *flags]) == 0

    assert (served[0].port, served[0].fail_closed) == (port, fail_closed)


def test_log_directory_that_cannot_be_made_is_a_sentence(capsys, tmp_path, monkeypatch):
    """A file is in the way: the user is told so, without a traceback."""
    monkeypatch.setattr(service, "run", lambda *_: 0)
    (tmp_path / "logs").touch()

    assert cli.main(["serve", "--log-dir", str(tmp_path / "logs")]) == 1

    assert capsys.readouterr().err.startswith("vllm-extproc: ")


# --- envoy-config -------------------------------------------------------------------------------


def test_envoy_config_is_the_bootstrap(capsys):
    """What is printed is YAML, and what the builder makes of the two addresses."""
    arguments = ["--grpc-address", "unix:/run/x.sock", "--envoy-admin-address", "127.0.0.1:1"]

    assert cli.main(["envoy-config", *arguments]) == 0

    expected = build_bootstrap(Address(path="/run/x.sock"), Address("127.0.0.1", 1))
    assert yaml.safe_load(capsys.readouterr().out) == expected


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--fail-closed"], ["--body-mode", "full_duplex"]], ids=str)
def test_static_envoy_config_is_the_standalone_configuration(capsys, flags):
    """Listener, routes, clusters and the workers, as the builders make them."""
    urls = ["http://10.0.0.5:8000", "http://[::1]:8001"]

    assert cli.main(["envoy-config", "--static", *flags, "--worker-urls", *urls]) == 0

    config = Config(
        worker_urls=tuple(urls),
        fail_closed="--fail-closed" in flags,
        body_mode="full_duplex" if "full_duplex" in flags else "buffered",
    )
    endpoints = (EndpointView("10.0.0.5:8000"), EndpointView("[::1]:8001"))
    model = envoy_model(config, (ClusterView(DEFAULT_POOL, "", endpoints, is_default=True),))
    expected = build_standalone(model, Address("127.0.0.1", 9002), ENVOY_ADMIN)
    assert yaml.safe_load(capsys.readouterr().out) == expected


@pytest.mark.usefixtures("no_names")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--envoy-admin-address", "x"], "--envoy-admin-address: expected unix:/path or ip:port"),
        (
            ["--static", "--worker-urls", "http://worker.invalid"],
            "'worker.invalid' cannot be resolved",
        ),
    ],
    ids=str,
)
def test_envoy_config_says_what_is_wrong(capsys, arguments, message):
    """A static configuration needs addresses: a name without one is an error here."""
    assert cli.main(["envoy-config", *arguments]) == 1

    assert message in capsys.readouterr().err


@pytest.fixture
def no_names(monkeypatch):
    """Make the resolver know nobody."""

    def getaddrinfo(*_args, **_kwargs):
        raise OSError("unknown")

    monkeypatch.setattr("extproc.check.socket.getaddrinfo", getaddrinfo)


# --- check --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--config"]], ids=["position", "flag"])
def test_check_accepts_a_good_configuration(capsys, envoy, file, how):
    """The file may stand alone or behind ``--config``; Envoy is asked too."""
    assert cli.main(["check", *how, file, "--envoy-path", envoy(0)]) == 0

    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "configuration: valid",
        "Envoy configuration: valid (envoy --mode validate)",
    ]


def test_check_takes_the_file_once(capsys, file):
    """Two files would leave open which one counts."""
    assert cli.main(["check", file, "--config", file]) == 1

    assert "give the file once" in capsys.readouterr().err


@pytest.mark.slow
def test_check_repeats_what_envoy_says_against_it(capsys, envoy, file):
    """Status 1 and Envoy's words."""
    assert cli.main(["check", file, "--envoy-path", envoy(1, "no such filter")]) == 1

    assert "Envoy refuses the configuration: no such filter" in capsys.readouterr().err


@pytest.mark.slow
def test_check_without_an_envoy_checks_the_rest(capsys, file):
    """It says so, and is content."""
    assert cli.main(["check", file, "--envoy-path", "/nonexistent/envoy"]) == 0

    shown = capsys.readouterr().out
    assert "configuration: valid" in shown
    assert "Envoy configuration: not checked" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("no_names")
@pytest.mark.parametrize(
    ("urls", "warning"),
    [
        ([], "warning: no workers; every request will be answered with 503"),
        (["http://worker.invalid"], "warning: worker name 'worker.invalid' cannot be resolved"),
    ],
)
def test_check_warns_of_what_may_be_mended_later(capsys, envoy, urls, warning):
    """No worker, or a name that does not resolve yet: valid, but worth a word."""
    assert cli.main(["check", "--worker-urls", *urls, "--envoy-path", envoy(0)]) == 0

    assert warning in capsys.readouterr().out


@pytest.mark.slow
def test_check_reads_the_worker_file(capsys, envoy, tmp_path):
    """Its workers are in the configuration that Envoy is asked about; a broken file is refused."""
    path = tmp_path / "workers.yaml"
    path.write_text("- http://10.0.0.5:8000\n")
    arguments = ["check", "--worker-file", str(path), "--envoy-path", envoy(0)]

    assert cli.main(arguments) == 0
    assert "warning" not in capsys.readouterr().out

    path.write_text("- ftp://10.0.0.5\n")
    assert cli.main(arguments) == 1
    assert "ftp://10.0.0.5" in capsys.readouterr().err


@pytest.mark.slow
def test_check_does_not_miss_workers_that_a_name_will_bring(capsys, envoy):
    """Nobody is asked for a name that stands for many: it changes all the time."""
    arguments = ["check", "--worker-dns", "http://workers.invalid:8000", "--envoy-path", envoy(0)]

    assert cli.main(arguments) == 0

    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "not PEM"])
def test_check_refuses_a_file_of_certificates_that_is_none(capsys, envoy, tmp_path, content):
    """Envoy would refuse every https worker, at run time."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)

    assert cli.main(["check", "--worker-ca-file", str(path), "--envoy-path", envoy(0)]) == 1

    assert str(path) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("directory", "logged"), [("/run/router", True), ("", False)], ids=["logged", "not"]
)
def test_envoy_config_names_the_logs_that_the_service_follows(capsys, directory, logged):
    """Ejections in the bootstrap, health checks in the clusters."""
    arguments = ["--worker-urls", "http://10.0.0.5:8000", "--envoy-events-dir", directory]

    assert cli.main(["envoy-config", "--static", *arguments]) == 0

    shown = capsys.readouterr().out
    assert ("event_log_path: /run/router/outlier.jsonl" in shown) is logged
    assert ("event_log_path: /run/router/health.jsonl" in shown) is logged


@pytest.mark.parametrize("command", ["envoy-config", "check"])
def test_secret_is_never_printed(capsys, envoy, command):
    """Neither on success nor in an error."""
    secrets = ["--admin-api-key", "hunter2", "--worker-api-key", "hunter3"]

    assert cli.main([command, *secrets, "--envoy-path", envoy(0)]) == 0
    assert cli.main([command, *secrets, "--admin-api-key", "hunter2 "]) == 1

    shown = capsys.readouterr()
    assert "hunter" not in shown.out + shown.err


@pytest.mark.slow
def test_render_prefers_ipv4_of_a_name(monkeypatch):
    """As the running service does."""
    found = [(10, 1, 6, "", ("::1", 0, 0, 0)), (2, 1, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr("extproc.check.socket.getaddrinfo", lambda *_a, **_k: found)

    config = Config(worker_urls=("http://worker:8000",), envoy_admin_address="127.0.0.1:1")
    text = render_envoy_config(config, static=True)

    (pool,) = [
        cluster
        for cluster in yaml.safe_load(text)["static_resources"]["clusters"]
        if cluster["name"] == DEFAULT_POOL
    ]
    (endpoint,) = pool["load_assignment"]["endpoints"][0]["lb_endpoints"]
    address = endpoint["endpoint"]["address"]["socket_address"]
    assert (address["address"], address["port_value"]) == ("127.0.0.1", 8000)
