"""Which requests a worker spoils, and how. Pure: the worker asks ``FaultPlan`` for a verdict."""

import enum
import random

import msgspec

MAX_SLOWDOWN = 1_000_000


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The faults in force; the defaults do nothing. ``POST /_sim/faults`` takes any of the fields."""

    fail_first_n: int = 0
    """Answer this many inference requests with ``status_code``, counted since the faults were set."""

    status_code: int = 500
    """HTTP status of a failed request, 400 to 599."""

    retry_after_s: int | None = None
    """Seconds that a failed request names in ``Retry-After``; None: it names none."""

    random_fail_rate: float = 0.0
    """Share of the inference requests to fail, 0 to 1, drawn from the seeded generator."""

    crash_on_request: int = 0
    """Die on this inference request, counted from 1 since the faults were set; 0 never does."""

    stall_after: int | None = None
    """Output tokens after which a stream stops but stays open; None never stalls."""

    slowdown: float = 1.0
    """How many times as long the engine takes for each token, the first one too, also of requests that it
    has already. 1: nothing is slowed. An engine that does not wait at all (``speed`` 0) has nothing to stretch."""

    reset_after: int | None = None
    """Output tokens after which a stream's TCP connection is reset; None never does."""

    health_status: int = 200
    """HTTP status of ``/health`` and ``/ping``, 200 to 599."""

    health_hang: bool = False
    """Never answer ``GET /health`` while this is set."""

    models_status: int = 200
    """HTTP status of ``GET /v1/models``, 200 to 599; an error comes without the list."""

    def __post_init__(self) -> None:
        if not 400 <= self.status_code <= 599:
            raise ValueError(f"status_code must be 400 to 599, got {self.status_code!r}")
        if not 0 <= self.random_fail_rate <= 1:
            raise ValueError(f"random_fail_rate must be 0 to 1, got {self.random_fail_rate!r}")
        if not 1 <= self.slowdown <= MAX_SLOWDOWN:
            raise ValueError(f"slowdown must be 1 to {MAX_SLOWDOWN}, got {self.slowdown!r}")
        for field in ("health_status", "models_status"):
            status = getattr(self, field)
            if not 200 <= status <= 599:
                raise ValueError(f"{field} must be 200 to 599, got {status!r}")
        for field in (
            "fail_first_n",
            "crash_on_request",
            "retry_after_s",
            "stall_after",
            "reset_after",
        ):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ValueError(f"{field} must be >= 0, got {value!r}")


class Verdict(enum.Enum):
    """What happens to one inference request."""

    SERVE = enum.auto()
    FAIL = enum.auto()
    CRASH = enum.auto()


class FaultPlan:
    """Counts inference requests and applies the faults to them."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self.faults = faults
        self._rng = rng
        self._seen = 0

    def replace(self, faults: Faults) -> None:
        """Put *faults* in force; ``fail_first_n`` and ``crash_on_request`` count from here."""
        self.faults = faults
        self._seen = 0

    def judge(self) -> Verdict:
        """Count one inference request and say what happens to it."""
        self._seen += 1
        faults = self.faults
        if faults.crash_on_request == self._seen:
            return Verdict.CRASH
        if self._seen <= faults.fail_first_n:
            return Verdict.FAIL
        if faults.random_fail_rate and self._rng.random() < faults.random_fail_rate:
            return Verdict.FAIL
        return Verdict.SERVE


def merge(faults: Faults, patch: bytes | bytearray) -> Faults:
    """Return *faults* with the fields of the JSON object *patch* replaced.

    ``msgspec.ValidationError`` names a wrong or unknown field.
    """
    fields = msgspec.json.decode(patch or b"{}", type=dict[str, object])
    return msgspec.convert({**msgspec.to_builtins(faults), **fields}, Faults)
