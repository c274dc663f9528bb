"""Errors of the engine: one tree, each with what was wrong and what to do.

EngineError
├── CheckpointError      the model's files cannot be used (missing, truncated, unsupported by name)
└── RequestError         one request cannot be served; the batch goes on without it
"""

from dataclasses import dataclass


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class CheckpointError(EngineError):
    """A checkpoint that is missing, damaged or not supported; the message names the culprit."""


class RequestError(EngineError):
    """One request that cannot be served.

    `code` is machine-readable (`invalid_request`, `prompt_too_long`, `unsupported_parameter`, ...),
    `param` names the offending field when there is one.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence ended without its answer. `retryable`: another try may succeed."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False

    @classmethod
    def from_error(cls, error: RequestError) -> "Failure":
        return cls(error.code, error.message, error.param)
