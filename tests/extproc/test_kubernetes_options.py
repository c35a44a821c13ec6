"""Options of the discovery of Pods."""

from __future__ import annotations

import re

import msgspec
import pytest

from extproc.config import Config
from extproc.discovery.updates import WorkerType


def test_selectors_as_users_write_them_become_those_of_the_api_server():
    """Between spaces or commas, in one value or several, once each, in one order."""
    config = Config(
        service_discovery=True,
        vllm_pd_disaggregation=True,
        selector=(f"b=2 a=1 {'a.' * 126}a/c=d", "b=2"),
        decode_selector=("example.com/role=decode,app=",),
    )

    assert config.selectors() == (
        (WorkerType.DECODE, "app=,example.com/role=decode"),
        (WorkerType.REGULAR, f"a=1,{'a.' * 126}a/c=d,b=2"),
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"service_discovery": True}, "service_discovery: selector must be given too"),
        (
            {"service_discovery": True, "vllm_pd_disaggregation": True},
            "service_discovery: selector or prefill_selector or decode_selector must be given",
        ),
        ({"selector": ("a=b",)}, "selector: service_discovery must be given too"),
        (
            {"service_discovery": True, "selector": ("a=b",), "prefill_selector": ("a=b",)},
            "prefill_selector: vllm_pd_disaggregation must be given too",
        ),
        ({"service_discovery": True, "selector": ("a",)}, "selector: expected KEY=VALUE"),
        ({"service_discovery": True, "selector": ("a!=b",)}, "selector: expected KEY=VALUE"),
        ({"service_discovery": True, "selector": ("a=b&limit=1",)}, "selector: expected KEY=VALUE"),
        ({"service_discovery": True, "selector": (" ",)}, "selector: expected KEY=VALUE"),
        ({"service_discovery": True, "selector": ("a..b/c=d",)}, "selector: expected KEY=VALUE"),
        ({"service_discovery": True, "selector": ("a-.b/c=d",)}, "selector: expected KEY=VALUE"),
        ({"service_discovery": True, "selector": (".b/c=d",)}, "selector: expected KEY=VALUE"),
        (
            {"service_discovery": True, "selector": (f"{'a.' * 127}/c=d",)},
            "selector: expected KEY=VALUE",
        ),
        (
            {"service_discovery": True, "selector": (f"{'a.' * 126}ab/c=d",)},
            "selector: expected KEY=VALUE",
        ),
        ({"service_discovery": True, "selector": ("a=b", "a=c")}, "no Pod has two values of 'a'"),
        (
            {
                "service_discovery": True,
                "selector": ("a=b",),
                "service_discovery_namespace": "../x",
            },
            "service_discovery_namespace: expected the name of a namespace",
        ),
        ({"bootstrap_port_annotation": "a b"}, "bootstrap_port_annotation: expected the name"),
        (
            {"vllm_pd_disaggregation": True, "prefill": ("http://10.0.0.1",)},
            "decode: there must be decode workers",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options, reason):
    """The text begins with the option, or names it."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        Config(**options)


def test_decode_workers_may_be_pods():
    """Prefill workers named by flags are not alone then."""
    Config(
        vllm_pd_disaggregation=True,
        prefill=("http://10.0.0.1",),
        service_discovery=True,
        decode_selector=("a=b",),
    )


def test_ranges_are_those_of_the_page():
    """A port that is none is refused before anything starts."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"service_discovery_port": 0}, Config)


def test_pods_learn_whether_prefill_and_decode_are_apart():
    """A role without effect would leave a worker without requests."""
    apart = Config(service_discovery=True, selector=("a=b",), vllm_pd_disaggregation=True)

    assert apart.pod_defaults().disaggregation is True
    assert Config().pod_defaults().disaggregation is False
