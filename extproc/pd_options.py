"""Options of prefill/decode disaggregation; a part of ``config.Config``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from extproc.address import Address, WorkerUrl
from extproc.discovery.updates import WorkerSpec, WorkerType
from extproc.security_options import SecurityOptions

NO_BOOTSTRAP = "none"


class PdOptions(SecurityOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who computes prompts, who generates, and how they find each other."""

    vllm_pd_disaggregation: Annotated[
        bool,
        Meta(
            description="Let prefill workers compute the prompts and decode workers generate from what those"
            " hand over."
        ),
    ] = False
    prefill: Annotated[
        tuple[str, ...],
        Meta(
            description="URL of a prefill worker, after it the port of its KV connector's bootstrap server,"
            " or none; may be given several times."
        ),
    ] = ()
    decode: Annotated[
        tuple[str, ...],
        Meta(description="URLs of the decode workers; may be given several times."),
    ] = ()
    prefill_data_parallel_size: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | None,
        Meta(
            description="Data-parallel ranks of each prefill worker; none: --intra-node-data-parallel-size."
        ),
    ] = None
    decode_data_parallel_size: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | None,
        Meta(
            description="Data-parallel ranks of each decode worker; none: --intra-node-data-parallel-size."
        ),
    ] = None
    kv_connector: Annotated[
        Literal["nixl", "mooncake", "nccl"],
        Meta(description="KV connector of the engines, which decides what both workers are told."),
    ] = "nixl"
    vllm_discovery_address: Annotated[
        str,
        Meta(
            description="Where workers with P2P-NCCL announce themselves over ZMQ, as ip:port. Whoever can connect"
            " there can become a worker. Empty: nowhere."
        ),
    ] = ""
    pd_min_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Prompts estimated to be shorter, in tokens, go to a decode worker as a whole.",
        ),
    ] = 0
    pd_fallback: Annotated[
        Literal["local", "error"],
        Meta(
            description="When no prefill worker could serve: let a decode worker do all of it, or answer 503."
        ),
    ] = "local"
    pd_topology_label: Annotated[
        str,
        Meta(
            description="Label of workers, such as zone, in which both workers of a request should agree."
        ),
    ] = ""
    pd_topology: Annotated[
        Literal["prefer", "require"],
        Meta(
            description="Whether another zone will do when there is no decode worker in the same one, or the"
            " request goes to a decode worker as a whole."
        ),
    ] = "prefer"
    prefill_leg_address: Annotated[
        str,
        Meta(
            description="Where Envoy takes this service's requests to prefill workers: host:port, of loopback, or"
            " unix:/path. `launch` chooses a Unix socket."
        ),
    ] = "127.0.0.1:9004"

    def discovery_address(self) -> Address | None:
        """Return the parsed ``vllm_discovery_address``. ``ValueError`` says what is wrong."""
        if not self.vllm_discovery_address:
            return None
        try:
            address = Address.parse(self.vllm_discovery_address)
        except ValueError as error:
            raise ValueError(f"vllm_discovery_address: {error}") from error
        if address.path or not address.port:
            raise ValueError(
                f"vllm_discovery_address: expected ip:port, got {self.vllm_discovery_address!r}"
            )
        return address

    def prefill_specs(self) -> tuple[WorkerSpec, ...]:
        """Return the parsed ``prefill``. ``ValueError`` says what is wrong."""
        found: list[WorkerSpec] = []
        expected = "expected URL, or URL and port (or none)"
        after_url = False
        for word in _words(self.prefill):
            if "://" in word:
                found.append(WorkerSpec(WorkerUrl.parse(word), worker_type=WorkerType.PREFILL))
                after_url = True
                continue
            if not after_url:
                raise ValueError(f"prefill: {word!r} follows no URL; {expected}")
            after_url = False
            if word.lower() == NO_BOOTSTRAP:
                continue
            if not word.isdecimal() or not 1 <= int(word) <= 65535:
                raise ValueError(f"prefill: {word!r} is no port; {expected}")
            found[-1] = WorkerSpec(
                found[-1].url, worker_type=WorkerType.PREFILL, bootstrap_port=int(word)
            )
        return tuple(found)

    def decode_specs(self) -> tuple[WorkerSpec, ...]:
        """Return the parsed ``decode``. ``ValueError`` says what is wrong."""
        return tuple(
            WorkerSpec(WorkerUrl.parse(word), worker_type=WorkerType.DECODE)
            for word in _words(self.decode)
        )


def _words(values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in value.split()]
