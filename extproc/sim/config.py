"""What one simulated worker is told at its start."""

import dataclasses

from extproc.sim.faults import Faults
from extproc.sim.step_model import HARDWARE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Settings of a ``SimWorker``; the defaults are those of the command line."""

    name: str = "sim"
    """ASCII; sent as ``x-sim-worker`` and said in every answer."""

    models: tuple[str, ...] = ("sim-model",)
    """Served model names. The first is the label of the metrics, the others are aliases."""

    host: str = "127.0.0.1"
    port: int = 0
    """TCP port; 0 takes a free one."""

    hardware: str = "h100"
    """Key of ``step_model.HARDWARE``."""

    speed: float = 1.0
    """Seconds simulated per second. 0 does not wait at all: as fast as the host allows."""

    kv_blocks: int | None = None
    """KV blocks of 16 tokens; None takes what the hardware has room for."""

    max_num_seqs: int = 256
    """Sequences in one batch; vLLM's default."""

    max_num_batched_tokens: int = 8192
    """Tokens in one step; vLLM's default on these GPUs."""

    max_model_len: int = 131_072
    """Longest prompt and output together, in tokens; also bounded by the KV blocks."""

    itl_ms: float | None = None
    """Fixed time between tokens, in ms of real time whatever ``speed`` is; None follows the step model."""

    ttft_ms: float | None = None
    """Fixed time from admission to the first token, in ms of real time; None with ``itl_ms`` set means ``itl_ms``.
    Set alone, the tokens after the first come at once."""

    record: int = 1000
    """Requests kept by the recorder; 0 records none."""

    seed: int = 0
    """Of the random faults."""

    faults: Faults = dataclasses.field(default_factory=Faults)

    def __post_init__(self) -> None:
        if not self.name.isascii() or not self.name.isprintable() or not self.name:
            raise ValueError(f"name must be printable ASCII, got {self.name!r}")
        if not self.models:
            raise ValueError("at least one model name is needed")
        if self.hardware not in HARDWARE:
            raise ValueError(
                f"hardware {self.hardware!r} is not known; known: {', '.join(sorted(HARDWARE))}"
            )
        self._check_at_least(0, "speed", "itl_ms", "ttft_ms", "record", "port")
        self._check_at_least(1, "kv_blocks", "max_num_seqs", "max_num_batched_tokens")
        self._check_at_least(1, "max_model_len")

    def _check_at_least(self, bound: int, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if value is not None and value < bound:
                raise ValueError(f"{field} must be >= {bound}, got {value!r}")
