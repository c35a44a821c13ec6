"""Which half of a request a worker computes, and how its KV gets to the other half."""

import dataclasses
from enum import StrEnum

from extproc.sim.kv_params import split_address


class Role(StrEnum):
    """What a worker is for; vLLM's kv_producer, kv_consumer and kv_both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Connector(StrEnum):
    """How KV is handed over; vLLM's NixlConnector, MooncakeConnector and P2pNcclConnector."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"
    NCCL = "nccl"


class TransferMode(StrEnum):
    """Who moves the blocks with NIXL: the decode worker, or the prefill worker."""

    PULL = "pull"
    PUSH = "push"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """Settings of KV transfer; the defaults are those of the command line."""

    role: str = Role.BOTH
    """Value of ``Role``; both also serves whole requests."""

    connector: str = Connector.NIXL
    """Value of ``Connector``."""

    transfer_mode: str = TransferMode.PULL
    """Value of ``TransferMode``; push is known to NIXL only."""

    transfer_mb_per_s: float = 25_000.0
    """Speed of a transfer, in 10^6 bytes per second of simulated time: 200 Gbit/s. 0 takes no time."""

    bytes_per_token: int = 131_072
    """KV of one token: what the step model's hardware has room for."""

    hold_s: float = 480.0
    """How long blocks that nobody pulls are kept, in simulated seconds (real ones at speed 0); vLLM's default."""

    host: str = "127.0.0.1"
    """Address on which the side channel and the bootstrap server listen, and by which other workers reach them."""

    port: int = 0
    """TCP port of the side channel; 0 takes a free one."""

    bootstrap_port: int = 8998
    """TCP port of Mooncake's bootstrap server; vLLM's default. 0 takes a free one."""

    zmq_address: str | None = None
    """``host:port`` by which P2P-NCCL request ids name this worker; None is the side channel's."""

    discovery_address: str | None = None
    """``host:port`` of the router's ZMQ socket that is pinged with P2P-NCCL; None pings nobody."""

    def __post_init__(self) -> None:
        self._check_known("role", Role)
        self._check_known("connector", Connector)
        self._check_known("transfer_mode", TransferMode)
        self._check_numbers()
        if self.transfer_mode == TransferMode.PUSH and self.connector != Connector.NIXL:
            raise ValueError("kv transfer_mode push needs the connector nixl")
        self._check_address("zmq_address")
        self._check_address("discovery_address")
        if self.discovery_address is not None and self.role == Role.BOTH:
            raise ValueError("discovery_address needs the role prefill or decode")

    def _check_known(self, field: str, known: type[StrEnum]) -> None:
        value = getattr(self, field)
        if value not in list(known):
            raise ValueError(f"kv {field} {value!r} is not known; known: {', '.join(known)}")

    def _check_numbers(self) -> None:
        if self.transfer_mb_per_s < 0:
            raise ValueError(f"kv transfer_mb_per_s must be >= 0, got {self.transfer_mb_per_s!r}")
        if self.bytes_per_token < 1:
            raise ValueError(f"kv bytes_per_token must be >= 1, got {self.bytes_per_token!r}")
        if self.hold_s <= 0:
            raise ValueError(f"kv hold_s must be > 0, got {self.hold_s!r}")
        for field in ("port", "bootstrap_port"):
            port = getattr(self, field)
            if not 0 <= port <= 0xFFFF:
                raise ValueError(f"kv {field} must be 0 to 65535, got {port!r}")

    def _check_address(self, field: str) -> None:
        address = getattr(self, field)
        if address is None:
            return
        if self.connector != Connector.NCCL:
            raise ValueError(f"{field} needs the connector nccl")
        split = split_address(address)
        if split is None or split[1] == 0:
            raise ValueError(f"{field} must be host:port, got {address!r}")
