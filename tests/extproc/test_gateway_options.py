"""The service beside a gateway that has a configuration of its own."""

from __future__ import annotations

import msgspec
import pytest

from extproc.config import Config, load
from extproc.envoy_settings import circuit_rules, envoy_model
from extproc.errors import ConfigError
from extproc.gateway_options import ENVOY_ONLY
from extproc.key_sources import KeySources
from tests.extproc.test_reload import FIELDS, OTHERS

BOTH = frozenset(
    {
        # where things are, which a gateway has for itself
        *("host", "port", "admin_address", "prefill_leg_address", "envoy_events_dir"),
        # what the service heeds by itself, too
        *("max_payload_size", "decision_timeout_secs", "request_id_headers", "when_none_healthy"),
        *("worker_api_key", "worker_ca_file", "worker_tls_insecure", "kv_connector"),
    }
)
"""Options that Envoy is told of and that have a use without it, or are refused with another."""

VALUES = {
    **OTHERS,
    "api_keys_file": "/keys",
    "htpasswd_file": "/users",
    "jwt_issuer": "https://issuer.example",
    "jwt_jwks": "/jwks",
    "jwt_audiences": ("a",),
    "api_key_validation_urls": ("https://a.example/",),
    "tls_cert": "/cert",
    "tls_key": "/key",
    "tls_client_ca": "/ca",
    "body_mode": "full_duplex",
}


def other(name: str) -> object:
    default = getattr(Config(), name)
    if name in VALUES:
        return VALUES[name]
    return not default if isinstance(default, bool) else default + 1


class Reading:
    """A configuration that tells what of it is read."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._config = Config()

    def __getattr__(self, name):
        if name in FIELDS:
            self.read.add(name)
        return getattr(self._config, name)


def test_every_option_that_envoy_is_told_of_is_sorted():
    """A new one is refused beside a gateway, or has a use there."""
    config = Reading()
    envoy_model(config, ())
    circuit_rules(config)
    KeySources(config)

    assert config.read - ENVOY_ONLY <= BOTH
    assert not BOTH & ENVOY_ONLY
    assert FIELDS >= BOTH | ENVOY_ONLY


@pytest.mark.parametrize("name", sorted(ENVOY_ONLY))
def test_option_that_nobody_would_carry_out_is_refused(name):
    """Each of them, by its name; a gateway that was thought to ask for keys would let everybody in."""
    wanted = msgspec.structs.replace(Config())
    msgspec.structs.force_setattr(wanted, name, other(name))
    msgspec.structs.force_setattr(wanted, "ext_proc_only", True)

    with pytest.raises(ValueError, match=rf"^{name}: .*gateway's matter"):
        wanted._check_grpc()


@pytest.mark.parametrize(
    "flags",
    [{"jwt_issuer": "https://i.example", "jwt_jwks": "https://i.example/jwks"}, {"api_key": "k"}],
)
def test_command_line_is_refused(flags):
    """Not only the parts of it."""
    with pytest.raises(ConfigError, match="gateway's matter"):
        load(None, {"ext_proc_only": True, "grpc_address": "0.0.0.0:9002", **flags})


def test_key_of_the_workers_is_taken_though_grpc_is_on_a_network():
    """The service asks workers with it, and hands it to nobody."""
    flags = {"ext_proc_only": True, "grpc_address": "0.0.0.0:9002", "worker_api_key": "k"}

    assert load(None, flags).worker_api_key == "k"
