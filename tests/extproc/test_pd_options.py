"""Where workers may announce themselves, what the flag needs, and what is forgotten with a worker."""

from __future__ import annotations

import pytest

from extproc.address import Address
from extproc.config import Config
from extproc.discovery.updates import Reset
from extproc.main import Service
from extproc.pd.connector import Peer
from extproc.pd.nixl import Identity, Nixl

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:30001", Address("127.0.0.1", 30001)),
        ("[::1]:30001", Address("::1", 30001)),
        ("0.0.0.0:1", Address("0.0.0.0", 1)),
    ],
)
def test_discovery_address(text, address):
    """An IP address and a port; decode workers come from there, too."""
    config = Config(
        vllm_pd_disaggregation=True,
        vllm_discovery_address=text,
        prefill=("http://10.0.0.1:8000",),
    )

    assert config.discovery_address() == address


def test_nobody_is_announced_unless_asked_for():
    """There is no default port."""
    assert Config().discovery_address() is None


@pytest.mark.parametrize(
    "text", ["unix:/run/x", "127.0.0.1", "127.0.0.1:0", "host:1", "*:1", "a:b"]
)
def test_wrong_discovery_address(text):
    """The option is named."""
    with pytest.raises(ValueError, match=r"^vllm_discovery_address: expected"):
        Config(vllm_pd_disaggregation=True, vllm_discovery_address=text)


def test_discovery_address_needs_disaggregation():
    """It would have no effect."""
    with pytest.raises(ValueError, match="vllm_discovery_address: vllm_pd_disaggregation must be"):
        Config(vllm_discovery_address="127.0.0.1:1")


def test_a_required_topology_needs_its_label():
    """Without it nothing would be required."""
    with pytest.raises(ValueError, match="pd_topology: pd_topology_label must be given too"):
        Config(vllm_pd_disaggregation=True, pd_topology="require")


async def test_workers_that_are_gone_are_no_longer_known_to_push(tmp_path):
    """One that comes to the same address later has another identity."""
    config = Config(
        vllm_pd_disaggregation=True,
        prefill=(f"{A} none {B}",),
        decode=("http://10.0.0.3:8000",),
        grpc_address=f"unix:{tmp_path / 'grpc'}",
    )
    service = Service(config)
    service.fleet.on_update("static", Reset(config.specs()))
    rules = service._router.split_rules
    assert rules is not None
    assert isinstance(rules.connector, Nixl)
    identities = rules.connector.identities
    for host in ("10.0.0.1", "10.0.0.2"):
        identities.note(Peer(f"{host}:8000"), Identity("e", host, 5600))

    service.fleet.on_update("static", Reset(config.specs()[1:]))

    assert list(identities.known) == [("10.0.0.2:8000", None)]
