"""What of a changed configuration is applied."""

from __future__ import annotations

import typing

import msgspec
import pytest

from extproc.config import Config, build_policy
from extproc.discovery.updates import Reset
from extproc.envoy_settings import envoy_model, registry_settings
from extproc.key_sources import KeySources
from extproc.registry import Registry
from extproc.reload import RELOADABLE, plan
from extproc.xds.snapshot import LISTENER_TYPE, build_snapshot

OTHERS = {
    "worker_urls": ("http://10.0.0.9:1",),
    "worker_weights": (),
    "prefill": (),
    "decode": (),
    "when_none_healthy": "try",
    "model_aliases": ("a=b",),
    "default_model": "m",
    "health_check_endpoint": "/x",
    "api_key": "k",
    "api_keys_file": "",
    "htpasswd_file": "",
    "jwt_issuer": "",
    "jwt_jwks": "",
    "jwt_audiences": (),
    "api_key_validation_urls": (),
    "admin_api_key": "a",
    "worker_api_key": "w",
    "cors_allowed_origins": ("https://a.example",),
    "disable_retries": True,
    "retry_budget_ratio": 0.5,
    "retry_jitter_factor": 0.5,
}
"""Another value for options of which one more is none; of the ways to authenticate one."""

FIELDS = {field.name for field in msgspec.structs.fields(Config)}


def test_every_reloadable_option_is_one():
    """A name that is mistyped would never be applied."""
    assert FIELDS >= RELOADABLE


def test_equal_configurations_change_nothing():
    """The file may have been touched."""
    reload = plan(Config(port=1), Config(port=1))

    assert (reload.config, reload.changed, reload.held_back) == (Config(port=1), (), ())


def test_what_needs_a_restart_is_held_back_and_the_rest_applied():
    """Neither is lost: one is told, the other in force."""
    running = Config(port=1, queue_size=1)

    reload = plan(running, Config(port=2, queue_size=2, policy="random"))

    assert reload.config == Config(port=1, queue_size=2)
    assert reload.changed == ("queue_size",)
    assert reload.held_back == ("policy", "port")


def test_options_that_do_not_go_together_are_refused():
    """A weight without its worker, once the worker is there no more."""
    running = Config(worker_urls=("http://a:1",), worker_weights=("http://a:1=2",))

    with pytest.raises(ValueError, match="names no worker"):
        msgspec.structs.replace(running, worker_urls=("http://b:1",)).__post_init__()

    wanted = Config(worker_urls=("http://b:1",))
    assert plan(running, wanted).config == wanted


@pytest.mark.parametrize("name", sorted(FIELDS - RELOADABLE))
def test_option_that_is_held_back_stays_as_it_was(name):
    """Whatever it is."""
    hint = typing.get_type_hints(Config)[name]
    default = getattr(Config(), name)
    running = Config()
    wanted = msgspec.structs.replace(running)
    other: object = object() if hint is None or default is None else (not default, default, default)
    msgspec.structs.force_setattr(wanted, name, other)

    reload = plan(running, wanted)

    assert reload.held_back == (name,)
    assert reload.config == running


def other(name):
    """Return another value of a reloadable option."""
    default = getattr(Config(), name)
    if name in OTHERS:
        return OTHERS[name]
    return not default if isinstance(default, bool) else default + 1


def listener(config):
    """Return the listener as Envoy gets it."""
    registry = Registry(lambda: build_policy(config), registry_settings(config))
    registry.apply("static", Reset(config.specs()), 0)
    registry.commit(0)
    keys = KeySources(config)
    model = envoy_model(config, registry.clusters, None, keys.auth)
    return build_snapshot(model).resources[LISTENER_TYPE]


@pytest.mark.parametrize("name", [*sorted(RELOADABLE), ""])
def test_reload_leaves_the_listener_alone(name):
    """Envoy would drain its connections; alone, and ("") all together."""
    chosen = {option: other(option) for option in (RELOADABLE if not name else {name})}

    assert listener(Config(**chosen)) == listener(Config())


def test_other_workers_of_a_role_leave_the_listener_alone():
    """They are endpoints like any."""
    before = {"vllm_pd_disaggregation": True, "prefill": ("http://a",), "decode": ("http://b",)}
    after = {**before, "prefill": ("http://c", "8998"), "decode": ("http://b", "http://d")}

    assert listener(Config(**before)) == listener(Config(**after))
    assert plan(Config(**before), Config(**after)).held_back == ()


@pytest.mark.parametrize("method", ["api_keys_file", "htpasswd_file", "jwt", "urls"])
def test_other_way_to_authenticate_leaves_the_listener_alone(method, tmp_path):
    """Each of them."""
    file = tmp_path / "keys"
    file.write_text(
        {
            "api_keys_file": "a key-of-a\n",
            "htpasswd_file": "u:{SHA}0DPiKuNIrrVmD8IUCuw1hQxNqZc=\n",
            "jwt": '{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}',
            "urls": "",
        }[method]
    )
    chosen = {
        "jwt": {"jwt_issuer": "https://i.example", "jwt_jwks": str(file)},
        "urls": {"api_key_validation_urls": ("https://a.example/",)},
    }.get(method, {method: str(file)})

    assert listener(Config(**chosen)) == listener(Config())
