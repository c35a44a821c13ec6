"""What one simulated worker is told at its start."""

import dataclasses

from extproc.sim.faults import Faults
from extproc.sim.kv_config import KvConfig
from extproc.sim.served_models import parse_lora_module
from extproc.sim.step_model import HARDWARE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Settings of a ``SimWorker``; the defaults are those of the command line."""

    name: str = "sim"
    """ASCII; sent as ``x-sim-worker`` and said in every answer."""

    models: tuple[str, ...] = ("sim-model",)
    """Served model names. The first is the label of the metrics, the others are aliases."""

    lora_modules: tuple[str, ...] = ()
    """LoRA adapters on the first model, as ``NAME`` or ``NAME=PATH``."""

    host: str = "127.0.0.1"
    port: int = 0
    """TCP port; 0 takes a free one."""

    root_path: str = ""
    """Path that every route is below, such as ``/x``; empty for none. ``/_sim`` answers without it too."""

    ssl_certfile: str | None = None
    """PEM certificate to serve https with; None serves http."""

    ssl_keyfile: str | None = None
    """Its private key; None when the certificate's file has it."""

    api_key: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token that the API needs; None asks for none."""

    startup_delay_s: float = 0.0
    """How long the model seems to load, in seconds of real time; health and inference answer 503."""

    hardware: str = "h100"
    """Key of ``step_model.HARDWARE``."""

    speed: float = 1.0
    """Seconds simulated per second. 0 does not wait at all: as fast as the host allows."""

    data_parallel_size: int = 1
    """Ranks, each an engine of its own with all of the limits below."""

    data_parallel_start_rank: int = 0
    """Number of the first rank."""

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

    kv: KvConfig = dataclasses.field(default_factory=KvConfig)
    """Which half of a request is computed here, and how the KV gets to the other half."""

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
        self._check_at_least(0, "data_parallel_start_rank", "startup_delay_s")
        self._check_at_least(1, "kv_blocks", "max_num_seqs", "max_num_batched_tokens")
        self._check_at_least(1, "max_model_len", "data_parallel_size")
        self._check_lora_modules()
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path must start with / and not end so, got {self.root_path!r}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        if self.api_key == "":
            raise ValueError("api_key must not be empty")

    def _check_lora_modules(self) -> None:
        for module in self.lora_modules:
            name, _ = parse_lora_module(module)
            if not name or name in self.models:
                raise ValueError(
                    f"lora_modules must be NAME or NAME=PATH with a name of its own, got {module!r}"
                )

    def _check_at_least(self, bound: int, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if value is not None and value < bound:
                raise ValueError(f"{field} must be >= {bound}, got {value!r}")
