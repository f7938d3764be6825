"""The exception tree. Whoever raises one of these writes what is wrong and what a person can do about it.

SpmdServeError
├── ConfigError (ValueError)            options that are unknown, contradictory or out of range
├── ModelError (ValueError)             the model cannot be served as given
│   ├── UnsupportedModelError           architecture or feature that is not known (lists those that are)
│   └── WeightsError                    missing, extra, wrongly shaped tensors; corrupt files
├── RequestError (ValueError)           what a client sent; carries HTTP status, OpenAI `param` and `code`
│   └── OverloadedError                 503 with Retry-After: queue full, draining
├── DistributedError (RuntimeError)     the ranks cannot go on together
│   ├── FingerprintMismatchError        ranks do not run the same thing (names rank, host, field)
│   ├── RankDivergenceError             ranks decided differently (names step, rank, field)
│   ├── RankLostError                   a rank died or stopped answering (names it)
│   └── ControlTimeoutError             the control channel waited longer than --control-timeout
├── FrontendError (RuntimeError)        rank 0's HTTP frontend died, did not start or does not take its output
└── DeviceMemoryError (RuntimeError)    out of device memory; names the option to change
"""

from __future__ import annotations

REFUSED = 2  # exit code of a rank whose job was refused; a restart cannot cure that


class SpmdServeError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(SpmdServeError, ValueError):
    """Options that are unknown, contradictory or out of range."""


class ModelError(SpmdServeError, ValueError):
    """The model cannot be served as given."""


class UnsupportedModelError(ModelError):
    """An architecture, or a feature of one, that is not supported."""


class WeightsError(ModelError):
    """Missing, extra or wrongly shaped tensors, or a corrupt file."""


class RequestError(SpmdServeError, ValueError):
    """A request that is refused; becomes an OpenAI error body.

    Args:
        message: what is wrong and what would be right.
        param: the request field at fault, or None.
        status: HTTP status.
        code: OpenAI's machine-readable code, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after = 1 if status == 503 else None  # seconds


class OverloadedError(RequestError):
    """503: the server is draining or its queue is full. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message, status=503, code="overloaded")
        self.retry_after = retry_after


class DistributedError(SpmdServeError, RuntimeError):
    """The ranks cannot go on together; the job ends."""


class FingerprintMismatchError(DistributedError):
    """Ranks were started with different code, options, model configuration or tokenizer files."""


class RankDivergenceError(DistributedError):
    """Ranks decided differently on the same input."""


class RankLostError(DistributedError):
    """A rank died or stopped answering."""


class ControlTimeoutError(DistributedError):
    """The control channel waited longer than --control-timeout."""


class FrontendError(SpmdServeError, RuntimeError):
    """Rank 0's HTTP frontend died, did not start or does not take its output; the job ends."""


class DeviceMemoryError(SpmdServeError, RuntimeError):
    """Out of device memory; the message names the option to change."""


# Raised at the start, these say that what the user gave cannot be served. Of the others (a host that came late, memory that a
# predecessor still holds) a restart may get rid.
REFUSALS = (ConfigError, ModelError, FingerprintMismatchError)
