"""The configuration: defaults, file, flags, and what is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest

from extproc.address import WorkerUrl
from extproc.config import (
    POLICY_OPTIONS,
    SECRETS,
    Config,
    PolicyConfig,
    bind_ip,
    build_policy,
    check_ip,
    load,
    policy_default,
)
from extproc.errors import ConfigError
from policies import registry
from policies.base import Request, Worker
from policies.round_robin import RoundRobin

registry.load_builtin()  # names are collected before any fixture runs
SWITCHES = [f.name for f in msgspec.structs.fields(Config) if isinstance(f.default, bool)]


@dataclasses.dataclass(slots=True, kw_only=True)
class Tunable:
    """A policy with parameters."""

    name: ClassVar[str]
    needs_body: ClassVar[bool] = False

    choices: int = 2
    _state: int = 0

    def __post_init__(self) -> None:
        if self.choices < 2:
            raise ValueError(f"choices must be >= 2, got {self.choices}")

    def pick(
        self, request: Request, workers: Sequence[Worker], *, now: float, rng: random.Random
    ) -> Worker:
        return workers[0]


@pytest.fixture
def tunable(monkeypatch):
    """Register a policy that has the parameter ``choices``."""
    monkeypatch.setattr(registry, "_registered", dict(registry.registered()))
    registry.register("tunable")(Tunable)


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "config.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", "127.0.0.1"),
        ("port", 30000),
        ("worker_urls", ()),
        ("max_payload_size", 536870912),
        ("request_timeout_secs", 1800),
        ("prometheus_host", "127.0.0.1"),
        ("prometheus_port", 29000),
        ("fail_closed", False),
        ("log_level", "info"),
        ("log_dir", ""),
        ("worker_startup_timeout_secs", 600),
        ("worker_startup_check_interval", 30),
        ("health_check_endpoint", "/health"),
        ("health_check_interval_secs", 60),
        ("health_check_timeout_secs", 5),
        ("health_failure_threshold", 3),
        ("health_success_threshold", 2),
        ("intra_node_data_parallel_size", 1),
        ("when_none_healthy", "refuse"),
        ("admin_api_key", ""),
        ("worker_api_key", ""),
    ],
)
def test_defaults_are_those_of_vllm_router(name, value):
    """Nothing given, nothing surprising; nobody but this machine can connect."""
    assert getattr(load(None, {}), name) == value


def test_every_option_has_a_meaning():
    """Help and documentation are made of it: a sentence each."""
    for name, schema in msgspec.json.schema(Config)["$defs"]["Config"]["properties"].items():
        assert schema["description"].endswith("."), name


@pytest.mark.parametrize("content", ["# nothing\n", "---\n", "{}"])
def test_empty_file_is_the_defaults(write, content):
    """A file in which everything is commented out is fine."""
    assert load(write(content), {}) == Config()


def test_file_is_read(write):
    """Every kind of value: text, numbers, lists, switches."""
    path = write(
        "host: 0.0.0.0\nport: 8080\nworker_urls: [http://a:8000, 'http://[::1]:8000']\n"
        "request_timeout_secs: 2.5\nfail_closed: true\npolicy: {name: random}\n"
    )

    config = load(path, {})

    assert config == Config(
        host="0.0.0.0",
        port=8080,
        worker_urls=("http://a:8000", "http://[::1]:8000"),
        request_timeout_secs=2.5,
        fail_closed=True,
        policy=PolicyConfig(name="random"),
    )
    assert config.workers() == (
        WorkerUrl(url="http://a:8000", host="a", port=8000),
        WorkerUrl(url="http://[::1]:8000", host="::1", port=8000),
    )


def test_flag_wins_over_file(write):
    """Each flag replaces its key as a whole; the other keys stay."""
    path = write("port: 1\nhost: 0.0.0.0\nworker_urls: [http://a, http://b]\n")

    config = load(path, {"port": 2, "worker_urls": ["http://c"]})

    assert (config.port, config.host, config.worker_urls) == (2, "0.0.0.0", ("http://c",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "unknown field `prot`"),
        ("worker-urls: []", "unknown field `worker-urls`"),
        ("port: many", r"Expected `int`, got `str` - at `\$.port`"),
        ("port: '8000'", r"Expected `int`, got `str` - at `\$.port`"),
        ("port: 0", r"Expected `int` >= 1 - at `\$.port`"),
        ("port: 65536", r"Expected `int` <= 65535 - at `\$.port`"),
        ("port: 1.5", r"\$.port"),
        ("port: null", r"\$.port"),
        ("port: true", r"\$.port"),
        ("prometheus_port: -1", r"\$.prometheus_port"),
        ("worker_urls: http://a", r"Expected `array`, got `str` - at `\$.worker_urls`"),
        ("worker_urls: [1]", r"\$.worker_urls\[0\]"),
        ("max_payload_size: 0", r"\$.max_payload_size"),
        ("max_payload_size: 4294967296", r"\$.max_payload_size"),
        ("request_timeout_secs: 0", r"\$.request_timeout_secs"),
        ("request_timeout_secs: -1", r"\$.request_timeout_secs"),
        ("request_timeout_secs: .nan", r"request_timeout_secs"),
        ("request_timeout_secs: .inf", r"request_timeout_secs"),
        ("request_timeout_secs: 1.0e+300", r"request_timeout_secs"),
        ("decision_timeout_secs: 0", r"\$.decision_timeout_secs"),
        ("decision_timeout_secs: .inf", r"decision_timeout_secs"),
        ("shutdown_grace_s: -0.1", r"\$.shutdown_grace_s"),
        ("shutdown_grace_s: .inf", r"shutdown_grace_s"),
        ("cache_threshold: 1.1", r"\$.cache_threshold"),
        ("balance_abs_threshold: -1", r"\$.balance_abs_threshold"),
        ("balance_rel_threshold: 0.9", r"\$.balance_rel_threshold"),
        ("eviction_interval_secs: 0", r"\$.eviction_interval_secs"),
        ("max_tree_size: 0", r"\$.max_tree_size"),
        ("max_tree_chars: 0", r"\$.max_tree_chars"),
        ("virtual_nodes: 0", r"\$.virtual_nodes"),
        ("balance_factor: 0.9", r"\$.balance_factor"),
        ("hash_fallback: none", r"\$.hash_fallback"),
        ("session_headers: ['x y']", "session_headers: 'x y' is not a header name"),
        ("session_headers: ['']", "session_headers: '' is not a header name"),
        ("fail_closed: 1", r"Expected `bool`, got `int` - at `\$.fail_closed`"),
        ("body_mode: partial", r"\$.body_mode"),
        ("log_level: loud", r"\$.log_level"),
        ("host: example.com", "host: expected an IP address .* got 'example.com'"),
        ("host: ''", "host: expected an IP address"),
        ("prometheus_host: example.com", "prometheus_host: expected an IP address"),
        ("grpc_address: 9002", r"\$.grpc_address"),
        ("grpc_address: nowhere", "grpc_address: expected unix:/path or ip:port, got 'nowhere'"),
        ("admin_address: 'unix:x'", "admin_address: unix socket path must be absolute"),
        ("worker_urls: [ftp://a]", "worker URL 'ftp://a': expected http://host:port"),
        ("worker_urls: [http://a, http://a/]", "worker_urls: 'http://a' is given twice"),
        ("worker_urls: [http://a, http://A:80]", "worker_urls: 'http://a' is given twice"),
        ("worker_urls: [http://a@0, http://a@0]", "worker_urls: 'http://a@0' is given twice"),
        ("worker_urls: [http://a, http://a@0]", "worker_urls: 'http://a@0' is given twice"),
        ("worker_urls: [http://a@0, http://a@1, http://a]", "worker_urls: 'http://a' is given twice"),
        ("worker_urls: [http://a@x]", "with a user or password"),
        ("worker_urls: [http://127.0.0.1:30000]", "'http://127.0.0.1:30000' is this router itself"),
        ("worker_urls: ['http://localhost:30000']", "is this router itself"),
        ("worker_file: 1", r"\$.worker_file"),
        ("worker_dns: http://a", r"Expected `array`, got `str` - at `\$.worker_dns`"),
        ("worker_dns: [a]", "worker URL 'a': expected http://host:port"),
        ("worker_dns: [http://a@1]", "worker_dns: 'http://a@1' names a rank; expected http://name:port"),
        ("worker_dns: [http://a, http://A:80/]", "worker_dns: a URL is given twice"),
        ("worker_dns_interval_secs: 0", r"\$.worker_dns_interval_secs"),
        ("worker_startup_timeout_secs: 0", r"\$.worker_startup_timeout_secs"),
        ("worker_startup_timeout_secs: .inf", r"worker_startup_timeout_secs"),
        ("worker_startup_check_interval: 0", r"\$.worker_startup_check_interval"),
        ("worker_poll_interval_secs: -1", r"\$.worker_poll_interval_secs"),
        ("worker_drain_timeout_secs: 0", r"\$.worker_drain_timeout_secs"),
        ("worker_api_key: 'a b'", "worker_api_key: expected visible ASCII characters without spaces"),
        ("worker_api_key: 5", r"Expected `str`, got `int` - at `\$.worker_api_key`"),
        ("admin_api_key: 'ä'", "admin_api_key: expected visible ASCII characters without spaces"),
        ("worker_tls_server_name: a b", "worker_tls_server_name: expected a host name, got 'a b'"),
        ("worker_tls_server_name: a:1", "worker_tls_server_name: expected a host name, got 'a:1'"),
        ("worker_tls_server_name: https://a", "worker_tls_server_name: expected a host name"),
        ("worker_tls_insecure: 1", r"Expected `bool`, got `int` - at `\$.worker_tls_insecure`"),
        ("health_check_endpoint: health", "health_check_endpoint: expected a path such as /health, got 'health'"),
        ("health_check_endpoint: ''", "health_check_endpoint: expected a path"),
        ("health_check_endpoint: '/a b'", "health_check_endpoint: expected a path"),
        ("health_check_interval_secs: 0", r"\$.health_check_interval_secs"),
        ("health_check_timeout_secs: .nan", r"health_check_timeout_secs"),
        ("health_failure_threshold: 0", r"\$.health_failure_threshold"),
        ("health_success_threshold: 0", r"\$.health_success_threshold"),
        ("health_success_threshold: 1.5", r"\$.health_success_threshold"),
        ("when_none_healthy: wait", r"\$.when_none_healthy"),
        ("model_aliases: [gpt-4]", "model_aliases: expected ALIAS=MODEL, got 'gpt-4'"),
        ("model_aliases: [=m]", "model_aliases: expected ALIAS=MODEL, got '=m'"),
        ("model_aliases: [a=]", "model_aliases: expected ALIAS=MODEL, got 'a='"),
        ("model_aliases: [a=m, a=n]", "model_aliases: 'a' is given twice"),
        ("model_aliases: [a=b, b=c]", "model_aliases: a=b names another alias"),
        ("model_aliases: [a=a]", "model_aliases: a=a names another alias"),
        (r'model_aliases: ["a=\n"]', "model_aliases: expected ALIAS=MODEL"),
        ("model_aliases: {a: m}", r"\$.model_aliases"),
        ("default_model: 1", r"\$.default_model"),
        ("lora_any: maybe", r"\$.lora_any"),
        ("intra_node_data_parallel_size: -1", r"\$.intra_node_data_parallel_size"),
        ("intra_node_data_parallel_size: 1025", r"\$.intra_node_data_parallel_size"),
        ("dp_rank_offset: 8", r"\$.dp_rank_offset"),
        ("envoy_admin_address: nowhere", "envoy_admin_address: expected unix:/path or ip:port, got 'nowhere'"),
        ("envoy_events_dir: events", "envoy_events_dir: expected an absolute path, got 'events'"),
        ("policy: p2c", "policy 'p2c' is not registered; known: .*round_robin"),
        ("policy: 7", r"\$.policy"),
        ("policy: {}", r"\$.policy"),
        ("policy: {name: random, choices: 3}", "unknown field `choices`"),
        (
            "policy: {name: random, params: {choices: 3}}",
            "no parameter 'choices'.* parameters: none",
        ),
        ("policy: {name: random, params: {name: x}}", "no parameter 'name'"),
        ("policy: {name: round_robin, params: {_last: 3}}", "no parameter '_last'"),
        ("policy: {name: random, params: 3}", r"\$.policy.params"),
        ("envoy_concurrency: -1", r"\$.envoy_concurrency"),
        ("[]", "expected a mapping of options, got list"),
        ("text", "expected a mapping of options, got str"),
        ("1: 2", "expected a mapping of options"),
        ("port: [1", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("host: !!python/object:os.system {}", "is not YAML"),
        ("--- 1\n--- 2\n", "is not YAML"),
        ("host: 2020-13-45", "is not YAML"),
        (b"host: \xff", "is not YAML"),
        (b"host: a\0b", "is not YAML"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_file_is_refused_in_one_sentence(write, content, message):
    """The text says which key and what was expected; never a traceback."""
    with pytest.raises(ConfigError, match=message):
        load(write(content), {})


def test_message_about_a_file_names_it(write):
    """People have more than one."""
    path = write("port: x")

    with pytest.raises(ConfigError) as caught:
        load(path, {})

    assert str(path) in str(caught.value)


@pytest.mark.parametrize("flags", [{"port": 0}, {"host": "x"}, {"policy": "x"}, {"nonsense": 1}])
def test_wrong_flag_is_refused(flags):
    """Flags pass through the same checks as the file."""
    with pytest.raises(ConfigError):
        load(None, flags)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_file_that_cannot_be_read_is_a_configuration_error(tmp_path, name):
    """Missing, or a directory: the system's reason is in the text."""
    with pytest.raises(ConfigError, match=r"cannot read .*: (No such file|Is a directory)"):
        load(tmp_path / name, {})


def test_configuration_is_frozen():
    """A running service has one; a change is a new object."""
    with pytest.raises(AttributeError):
        Config().port = 1


@pytest.mark.parametrize(
    ("host", "ip"), [("localhost", "127.0.0.1"), ("::", "::"), ("1.2.3.4",) * 2]
)
def test_localhost_is_the_one_name_to_listen_on(host, ip):
    """Envoy binds addresses, not names."""
    check_ip("host", host)

    assert bind_ip(host) == ip


@pytest.mark.parametrize("choice", ["round_robin", PolicyConfig(name="round_robin")])
def test_policy_is_built_from_its_name(choice):
    """Alone, or as ``{name}``."""
    assert build_policy(Config(policy=choice)) == RoundRobin()


@pytest.mark.parametrize("name", sorted(registry.registered()))
def test_every_policy_can_be_built_from_its_name_alone(name):
    """Every parameter has a default."""
    assert build_policy(Config(policy=name)).name == name


@pytest.mark.parametrize("option", sorted(POLICY_OPTIONS - {"session_headers"}))
def test_option_of_a_policy_has_the_default_of_its_class(option):
    """It stands in the class and nowhere else; the option says only "not given"."""
    value = {"hash_fallback": "body", "cache_threshold": 0.75}.get(option, 7)
    with_parameter = [
        cls for cls in registry.registered().values() if option in cls.__dataclass_fields__
    ]
    assert with_parameter

    for cls in with_parameter:
        default = cls.__dataclass_fields__[option].default
        assert getattr(build_policy(Config(policy=cls.name)), option) == default
        given = build_policy(Config(policy=cls.name, **{option: value}))
        assert getattr(given, option) == value
    assert getattr(Config(), option) is None
    assert policy_default(option) == with_parameter[0].__dataclass_fields__[option].default


def test_parameters_in_the_file_win_over_options():
    """``params`` names the very policy; an option may be meant for another one."""
    choice = PolicyConfig(name="cache_aware", params={"cache_threshold": 0.25})

    policy = build_policy(Config(policy=choice, cache_threshold=0.75, max_tree_size=9))

    assert (policy.cache_threshold, policy.max_tree_size) == (0.25, 9)


def test_option_of_another_policy_is_ignored():
    """So that one set of flags serves to compare policies."""
    assert build_policy(Config(policy="round_robin", cache_threshold=0.75)) == RoundRobin()


def test_session_headers_are_looked_up_in_lower_case():
    """As Envoy sends them."""
    policy = build_policy(Config(policy="consistent_hash", session_headers=("X-Conversation",)))

    assert policy.session_headers == ("x-conversation",)


def test_option_that_is_not_given_has_no_default_to_show():
    """``balance_factor`` is off."""
    assert policy_default("balance_factor") is None
    assert policy_default("no_such_option") is None


def test_each_policy_is_an_object_of_its_own():
    """State is never shared between two routers."""
    config = Config(policy="round_robin")

    assert build_policy(config) is not build_policy(config)


@pytest.mark.usefixtures("tunable")
@pytest.mark.parametrize(("params", "choices"), [({}, 2), ({"choices": 5}, 5)])
def test_policy_parameters_are_its_fields(params, choices):
    """Missing ones have the default of the class."""
    policy = build_policy(Config(policy=PolicyConfig(name="tunable", params=params)))

    assert (policy.name, policy.choices) == ("tunable", choices)


@pytest.mark.usefixtures("tunable")
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"choices": "many"}, r"policy 'tunable': Expected `int`, got `str` - at `\$.choices`"),
        ({"choices": 1}, "policy 'tunable': choices must be >= 2, got 1"),
        ({"choice": 3}, "policy 'tunable' has no parameter 'choice'; its parameters: choices"),
        ({"_state": 3}, "policy 'tunable' has no parameter '_state'"),
        ({"needs_body": True}, "policy 'tunable' has no parameter 'needs_body'"),
    ],
    ids=str,
)
def test_wrong_policy_parameter_is_named(params, message):
    """Because msgspec would drop unknown keys of a dataclass without a word."""
    with pytest.raises(ConfigError, match=message):
        build_policy(Config(policy=PolicyConfig(name="tunable", params=params)))


def test_weights_are_given_by_url():
    """Others have 1; the last word of a worker counts."""
    config = load(
        None,
        {
            "worker_urls": ["http://10.0.0.1:1", "http://10.0.0.2:1/"],
            "worker_weights": ["http://10.0.0.2:1/=2.5"],
        },
    )

    assert config.weights() == {"http://10.0.0.2:1": 2.5}


@pytest.mark.parametrize(
    "weight",
    ["http://10.0.0.9:1=2", "http://10.0.0.1:1", "http://10.0.0.1:1=", "2"]
    + [f"http://10.0.0.1:1={value}" for value in ("0", "-1", "nan", "inf", "x", "1000")],
)
def test_weight_that_makes_no_sense_is_refused(weight):
    """In one sentence that names it."""
    with pytest.raises(ConfigError, match="--worker-weights: ") as caught:
        load(None, {"worker_urls": ["http://10.0.0.1:1"], "worker_weights": [weight]})

    assert repr(weight) in str(caught.value)


# --- workers at run time ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_file", "/etc/workers.yaml"),
        ("worker_dns", ("http://workers:8000", "https://workers/llama")),
        ("worker_dns_interval_secs", 0.1),
        ("worker_startup_timeout_secs", 31_536_000),
        ("worker_api_key", "sk-!~=/+"),
        ("worker_tls_server_name", "worker-1.example_2.com"),
        ("worker_tls_server_name", "a"),
        ("worker_tls_server_name", "10.0.0.1"),
        ("worker_tls_server_name", "2001:db8::1"),
        ("worker_tls_insecure", True),
        ("health_check_endpoint", "/"),
        ("health_check_endpoint", "/v1/health?full=1"),
        ("health_failure_threshold", 1000),
        ("when_none_healthy", "try"),
        ("model_aliases", ("gpt-4=llama-3", "mini=Qwen/Qwen3-8B", "日本=m=n")),
        ("default_model", "llama-3"),
        ("lora_any", True),
        ("intra_node_data_parallel_size", 0),
        ("intra_node_data_parallel_size", 1024),
        ("dp_rank_offset", "global"),
        ("admin_api_key", "x" * 1000),
        ("envoy_admin_address", ""),
        ("envoy_admin_address", "unix:/run/envoy.sock"),
        ("envoy_admin_address", "[::1]:9901"),
        ("envoy_events_dir", "/run/vllm-extproc"),
    ],
    ids=str,
)
def test_option_of_workers_takes_what_makes_sense(name, value):
    """As it is given, from a file or from flags."""
    given = list(value) if isinstance(value, tuple) else value

    assert getattr(load(None, {name: given}), name) == value


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_off_by_default(name):
    """Nobody has to know of it."""
    assert getattr(Config(), name) is False


@pytest.mark.parametrize(
    ("host", "port", "url", "own"),
    [
        ("127.0.0.1", 8000, "http://127.0.0.1:8000", True),
        ("127.0.0.1", 8000, "http://localhost:8000", True),
        ("127.0.0.1", 8000, "https://127.0.0.1:8000/base", True),
        ("127.0.0.1", 8000, "https://127.0.0.2:8000/base", False),
        ("127.0.0.1", 8000, "http://127.0.0.1:8001", False),
        ("127.0.0.1", 8000, "http://10.0.0.1:8000", False),
        ("localhost", 80, "http://localhost", True),
        ("0.0.0.0", 8000, "http://127.0.0.1:8000", True),
        ("0.0.0.0", 8000, "http://[::1]:8000@3", True),
        ("::", 8000, "http://localhost:8000", True),
        ("0.0.0.0", 8000, "http://10.0.0.1:8000", False),
        ("10.0.0.1", 443, "https://10.0.0.1", True),
        ("10.0.0.1", 8000, "http://127.0.0.1:8000", False),
        ("127.0.0.1", 8000, "http://router.example:8000", False),
    ],
    ids=str,
)
def test_worker_is_not_where_the_router_itself_listens(host, port, url, own):
    """A request would go round in circles. What cannot be known from the address alone is let through."""
    config = Config(host=host, port=port)

    assert config.is_own_address(WorkerUrl.parse(url)) is own

    if own:
        with pytest.raises(ConfigError, match="is this router itself"):
            load(None, {"host": host, "port": port, "worker_urls": [url]})


def test_ranks_of_one_engine_are_workers_of_their_own():
    """Each with its weight; order as given."""
    config = load(
        None,
        {
            "worker_urls": ["http://a:1@1", "http://a:1@0", "http://a:1/base@1"],
            "worker_weights": ["http://a:1@0=2"],
        },
    )

    specs = config.specs()
    assert [spec.key for spec in specs] == ["http://a:1@1", "http://a:1@0", "http://a:1/base@1"]
    assert [spec.weight for spec in specs] == [1.0, 2.0, 1.0]
    assert [spec.url.rank for spec in specs] == [1, 0, 1]


def test_aliases_may_hold_an_equals_sign_in_the_model():
    """The first one separates: aliases are chosen by people, models have their names."""
    assert Config(model_aliases=("a=m=n", "b=m=n")).aliases() == {"a": "m=n", "b": "m=n"}


@pytest.mark.parametrize("name", sorted(SECRETS))
@pytest.mark.parametrize(
    ("file", "flag", "expected"),
    [
        ("", "", "from-environment"),
        ("{}: from-file", "", "from-file"),
        ("{}: ''", "", ""),
        ("{}: from-file", "from-flag", "from-flag"),
        ("", "from-flag", "from-flag"),
    ],
    ids=["environment", "file", "switched off in the file", "flag over file", "flag"],
)
def test_secret_may_come_from_the_environment(write, monkeypatch, name, file, flag, expected):
    """Flags show in the list of processes; what is said there or in the file wins all the same."""
    monkeypatch.setenv(f"VLLM_EXTPROC_{name.upper()}", "from-environment")

    config = load(write(file.format(name) or "{}"), {name: flag} if flag else {})

    assert getattr(config, name) == expected
    assert all(getattr(config, other) == "" for other in SECRETS - {name})


def test_no_other_option_comes_from_the_environment(monkeypatch):
    """One place to look for what is configured."""
    monkeypatch.setenv("VLLM_EXTPROC_PORT", "1")

    assert load(None, {}) == Config()


@pytest.mark.parametrize("value", ["hunter2 ", "hunter2\n", "hünter2"])
def test_secret_that_is_refused_is_not_repeated(monkeypatch, value):
    """The text names the option only."""
    monkeypatch.setenv("VLLM_EXTPROC_ADMIN_API_KEY", value)

    with pytest.raises(ConfigError, match="admin_api_key: expected visible ASCII") as caught:
        load(None, {})

    assert "nter2" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"queue_timeout_secs": 3600},
        {"queue_timeout_secs": 1800, "no_worker_timeout_secs": 1800},
        {"decision_timeout_secs": 3600},
    ],
    ids=str,
)
def test_waits_are_together_no_longer_than_envoy_has_patience(fields):
    """Envoy would refuse the whole configuration, or go on without a pick."""
    with pytest.raises(msgspec.ValidationError, match="at most 3600 seconds together"):
        msgspec.convert(fields, Config)
    msgspec.convert({"queue_timeout_secs": 1800, "no_worker_timeout_secs": 1700}, Config)


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "not a header name"), ("a b", "not a header name"), ("Authorization", "credentials")],
)
def test_request_id_header_is_one_that_the_service_sees(name, message):
    """No credentials: Envoy keeps them to itself."""
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"request_id_headers": ["x-ok", name]}, Config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"api_key": "a", "htpasswd_file": "f"},
            "htpasswd_file: clients cannot show api_key as well",
        ),
        (
            {"api_keys_file": "a", "jwt_issuer": "i", "jwt_jwks": "f"},
            "jwt_issuer: clients cannot show",
        ),
        (
            {"htpasswd_file": "f", "api_key_validation_urls": ["http://a"]},
            "api_key_validation_urls: clients cannot show htpasswd_file as well",
        ),
        ({"jwt_issuer": "i"}, "jwt_jwks: must be given"),
        ({"jwt_jwks": "f"}, "jwt_issuer: must be given"),
        ({"jwt_audiences": ["a"]}, "jwt_issuer: must be given"),
        ({"jwt_issuer": "i", "jwt_jwks": "ftp://a/b"}, "jwt_jwks: expected a URL"),
        ({"jwt_issuer": "i", "jwt_jwks": "https://u:p@a/b"}, "jwt_jwks: a URL may hold no user"),
        ({"cors_allowed_origins": ["chat.example"]}, "cors_allowed_origins: expected"),
        ({"cors_allowed_origins": ["https://chat.example/"]}, "cors_allowed_origins: expected"),
        ({"cors_allowed_origins": ["https://*.example"]}, "cors_allowed_origins: expected"),
        ({"cors_allowed_origins": ["https://Chat.example"]}, "cors_allowed_origins: expected"),
        ({"cors_allowed_origins": ["null"]}, "cors_allowed_origins: expected"),
        (
            {"rate_limit_per_key": 0.0001},
            "rate_limit_per_key: expected 0 (no limit) or at least 0.001",
        ),
        ({"rate_limit_tokens_per_second": 1e-9}, "rate_limit_tokens_per_second: expected 0"),
    ],
)
def test_who_may_ask_must_make_sense(fields, message):
    """One way at a time, and whole."""
    with pytest.raises((msgspec.ValidationError, ValueError)) as refused:
        msgspec.convert(fields, Config)

    assert message in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": "a", "api_keys_file": "f"},
        {"jwt_issuer": "i", "jwt_jwks": "f", "jwt_audiences": ["a", "b"]},
        {"jwt_issuer": "i", "jwt_jwks": "https://idp.example/keys?x=1"},
        {"cors_allowed_origins": ["*"]},
        {
            "cors_allowed_origins": [
                "https://chat.example",
                "http://localhost:3000",
                "http://[::1]:1",
            ]
        },
        {"cors_allowed_origins": ["chrome-extension://abcdef"]},
        {"rate_limit_per_key": 0.001},
    ],
)
def test_who_may_ask_is_taken_where_it_makes_sense(fields):
    """Some go together."""
    msgspec.convert(fields, Config)


@pytest.mark.parametrize(
    "secret",
    [
        {"api_key": "k"},
        {"worker_api_key": "k"},
        {"htpasswd_file": "f"},
        {"api_keys_file": "f"},
        {"tls_cert": "c", "tls_key": "k"},
    ],
)
@pytest.mark.parametrize(
    ("address", "good"),
    [("unix:/s", True), ("127.0.0.1:1", True), ("0.0.0.0:1", False), ("10.0.0.1:1", False)],
)
def test_keys_are_not_handed_to_envoy_over_a_network(secret, address, good):
    """Whoever connects there gets them."""
    if good:
        Config(grpc_address=address, **secret)
    else:
        with pytest.raises(ValueError, match="Unix socket"):
            Config(grpc_address=address, **secret)


@pytest.mark.parametrize("issuer", ["a b", "a\ud800", "\x00"])
def test_issuer_that_envoy_could_not_be_told_is_refused(issuer):
    """Before anything is applied."""
    with pytest.raises(ValueError, match="visible ASCII"):
        Config(jwt_issuer=issuer, jwt_jwks="f")
    with pytest.raises(ValueError, match="visible ASCII"):
        Config(jwt_issuer="i", jwt_jwks="f", jwt_audiences=(issuer,))
