"""What the configuration says to Envoy and to the registry."""

from __future__ import annotations

import msgspec
import pytest

from extproc import envoy_settings
from extproc.address import Address
from extproc.admission import Limits
from extproc.circuit import CircuitRules
from extproc.clusters import ClusterView
from extproc.config import Config
from extproc.envoy_settings import (
    MAX_UNHEALTHY_INTERVAL_S,
    admission_limits,
    circuit_rules,
    envoy_model,
    registry_settings,
    retry_count,
    system_ca_file,
    unheeded_options,
)
from extproc.registry import Settings
from extproc.xds.model import Access, Breaker, HealthChecks, NobodyYet, WorkerTls

CLUSTERS = (ClusterView("y", "", (), is_default=True),)


def make(**fields):
    return envoy_model(msgspec.convert(fields, Config), CLUSTERS)


def test_defaults_are_those_of_the_configuration():
    """The clusters come from the registry."""
    config, model = Config(), make()

    assert (model.host, model.port) == (config.host, config.port)
    assert model.clusters == CLUSTERS
    assert model.admin_address == Address.parse(config.admin_address)
    assert model.max_payload_bytes == config.max_payload_size
    assert model.idle_timeout_s == config.request_timeout_secs
    assert model.decision_timeout_s == config.decision_timeout_secs
    assert model.health == HealthChecks(
        config.health_check_endpoint,
        config.health_check_interval_secs,
        MAX_UNHEALTHY_INTERVAL_S,
        config.health_check_timeout_secs,
        config.health_failure_threshold,
        config.health_success_threshold,
    )
    assert model.tls == WorkerTls(system_ca_file())
    for name in ("fail_closed", "full_duplex", "try_unhealthy"):
        assert getattr(model, name) is False


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"host": "localhost"}, "host", "127.0.0.1"),
        ({"port": 8080}, "port", 8080),
        ({"admin_address": "127.0.0.1:9"}, "admin_address", Address("127.0.0.1", 9)),
        ({"max_payload_size": 4096}, "max_payload_bytes", 4096),
        ({"request_timeout_secs": 7}, "idle_timeout_s", 7),
        ({"decision_timeout_secs": 2}, "decision_timeout_s", 2),
        ({"fail_closed": True}, "fail_closed", True),
        ({"body_mode": "full_duplex"}, "full_duplex", True),
        ({"when_none_healthy": "try"}, "try_unhealthy", True),
        ({"envoy_events_dir": "/run/events"}, "events_dir", "/run/events"),
        (
            {"worker_ca_file": "/ca.pem", "worker_tls_insecure": True},
            "tls",
            WorkerTls("/ca.pem", insecure=True),
        ),
    ],
)
def test_each_setting_reaches_envoy(fields, name, value):
    """Under the name that the builders know it by."""
    assert getattr(make(**fields), name) == value


@pytest.mark.parametrize(
    ("interval_s", "start_interval_s", "expected_s"),
    [(60, 30, MAX_UNHEALTHY_INTERVAL_S), (2, 30, 2), (60, 1, 1), (0.5, 0.25, 0.25)],
)
def test_unhealthy_workers_are_checked_at_least_every_few_seconds(
    interval_s, start_interval_s, expected_s
):
    """However long the interval for healthy ones is, one that comes back is found."""
    model = make(
        health_check_interval_secs=interval_s, worker_startup_check_interval=start_interval_s
    )

    assert model.health.interval_s == interval_s
    assert model.health.unhealthy_interval_s == expected_s


def test_certificates_of_the_system_are_where_they_are(tmp_path, monkeypatch):
    """The first place that exists; none when there is none."""
    places = tuple(str(tmp_path / name) for name in "abc")
    monkeypatch.setattr(envoy_settings, "SYSTEM_CA_FILES", places)
    assert system_ca_file() == ""

    for name in "cb":
        (tmp_path / name).touch()

    assert system_ca_file() == places[1]
    assert make().tls.ca_file == places[1]


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "follows_envoy", False),
        ({"envoy_admin_address": "unix:/run/envoy.sock"}, "follows_envoy", True),
        ({}, "try_unhealthy", False),
        ({"when_none_healthy": "try"}, "try_unhealthy", True),
        ({"lora_any": True}, "lora_any", True),
        ({"worker_startup_timeout_secs": 7}, "startup_s", 7),
        ({"worker_tls_server_name": "w.example"}, "tls_server_name", "w.example"),
        ({"worker_tls_insecure": True}, "tls_insecure", True),
        ({"intra_node_data_parallel_size": 4}, "ranks", 4),
        ({"intra_node_data_parallel_size": 4}, "prefill_ranks", 4),
        ({"intra_node_data_parallel_size": 4}, "decode_ranks", 4),
        ({"prefill_data_parallel_size": 2}, "prefill_ranks", 2),
        ({"decode_data_parallel_size": 0}, "decode_ranks", 0),
        ({}, "splits", False),
        ({"vllm_pd_disaggregation": True}, "splits", True),
        ({}, "global_ranks", False),
        ({"dp_rank_offset": "global"}, "global_ranks", True),
        ({}, "asks_models", True),
    ],
)
def test_each_setting_reaches_the_registry(fields, name, value):
    """Whoever asks workers for their models is always there."""
    config = msgspec.convert(fields, Config)

    assert getattr(registry_settings(config), name) == value


def test_registry_knows_where_clients_connect():
    """A worker there would be this router itself."""
    settings = registry_settings(msgspec.convert({"host": "127.0.0.1", "port": 8080}, Config))

    assert settings.is_router("127.0.0.1", 8080)
    assert not settings.is_router("127.0.0.1", 8081)
    assert not settings.is_router("10.0.0.1", 8080)


def test_registry_has_no_setting_that_is_left_out():
    """A new one must be thought of."""
    told = registry_settings(
        msgspec.convert(
            {
                "envoy_admin_address": "127.0.0.1:1",
                "worker_startup_timeout_secs": 1,
                "when_none_healthy": "try",
                "lora_any": True,
                "worker_tls_server_name": "w.example",
                "worker_tls_insecure": True,
                "intra_node_data_parallel_size": 2,
                "dp_rank_offset": "global",
                "vllm_pd_disaggregation": True,
                "cb_failure_threshold": 3,
                "max_worker_concurrency": 7,
            },
            Config,
        )
    )
    same = [
        name
        for name in Settings.__dataclass_fields__
        if getattr(told, name) == getattr(Settings(), name)
    ]

    assert same == ["follows_envoy", "asks_models"]


def test_limits_come_from_the_configuration():
    """All five, and how long Envoy waits for a decision on top."""
    fields = {
        "max_concurrent_requests": 7,
        "queue_size": 8,
        "queue_timeout_secs": 9,
        "no_worker_timeout_secs": 10,
        "decision_timeout_secs": 11,
    }

    limits = admission_limits(msgspec.convert(fields, Config))

    assert limits == Limits(concurrent=7, queue=8, queue_s=9, no_worker_s=10, grace_s=11)
    assert limits.patience_s == 30


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, CircuitRules()),
        (
            {
                "cb_failure_threshold": 4,
                "cb_success_threshold": 5,
                "cb_timeout_duration_secs": 6,
                "cb_window_duration_secs": 7,
                "cb_count_429": True,
            },
            CircuitRules(failures=4, successes=5, open_s=6, window_s=7, count_429=True),
        ),
        ({"disable_circuit_breaker": True}, CircuitRules(failures=0)),
    ],
)
def test_circuits_open_and_close_as_configured(fields, rules):
    """In the service and, as far as it knows them, in Envoy."""
    config = msgspec.convert(fields, Config)

    assert circuit_rules(config) == rules
    assert registry_settings(config).circuits == rules
    assert make(**fields).breaker == Breaker(rules.failures, rules.open_s, rules.count_429)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 5),
        ({"retry_max_retries": 2}, 2),
        ({"retry_max_retries": 0}, 0),
        ({"disable_retries": True}, 0),
    ],
)
def test_retries_are_as_many_as_configured(fields, count):
    """The same number for Envoy and for the budget."""
    assert retry_count(msgspec.convert(fields, Config)) == count
    assert make(**fields).retries.count == count


@pytest.mark.parametrize(
    ("fields", "unheeded"),
    [
        ({}, []),
        ({"retry_backoff_multiplier": 2.0}, ["retry_backoff_multiplier"]),
        ({"retry_jitter_factor": 0.0}, ["retry_jitter_factor"]),
    ],
)
def test_options_that_envoy_knows_nothing_of_are_named(fields, unheeded):
    """Whoever sets them should hear of it; the defaults are everybody's."""
    assert unheeded_options(msgspec.convert(fields, Config)) == unheeded


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": "a"},
        {"api_keys_file": "a"},
        {"htpasswd_file": "a"},
        {"jwt_issuer": "a", "jwt_jwks": "b"},
        {"api_key_validation_urls": ("https://a.example",)},
    ],
)
def test_nobody_gets_in_whose_keys_were_not_read(fields):
    """Whoever forgets to hand them over opens no door."""
    assert envoy_model(Config(**fields), ()).access.auth == NobodyYet()


def test_everybody_gets_in_where_nobody_is_asked():
    """The default; what else is said of access is handed on."""
    access = envoy_model(Config(), ()).access
    config = Config(worker_api_key="k", keep_client_authorization=True, cors_allowed_origins=("*",))

    assert access == Access()
    assert envoy_model(config, ()).access == Access(None, True, "k", ("*",))


def test_headers_of_ids_are_told_in_lower_case():
    """As Envoy has headers."""
    assert envoy_model(Config(request_id_headers=("X-Trace-Id",)), ()).request_id_headers == (
        "x-trace-id",
    )
