"""Every error the engine raises for somebody else's mistake or misfortune.

EngineError
├── ConfigError            a setting is wrong: one line that says what to do; the process does not start
│   └── ModelLoadError     the model folder is missing, damaged, unknown or too large
├── InvalidRequest         a request's field is wrong: HTTP 400, with the field's name
│   ├── ContextTooLong     prompt (or prompt plus max_tokens) over the context: HTTP 400
│   └── TransferRefused    a router of another fleet sent it, or one that means another engine: HTTP 400
├── QueueFull              admission limit reached: HTTP 429
├── RequestFailed          the engine accepted the request but could not finish it: HTTP 500
│   ├── StepOutOfMemory    the device had no room for the step that the request was in; it has for others
│   └── KVLoadFailed       its prompt's K/V did not come from the prefill engine: HTTP 503, before any token
└── EngineDead             the engine core is gone: HTTP 503, the server exits
"""

from __future__ import annotations

from pagefleet_protocol.kv_handoff import KvFault


class EngineError(Exception):
    """Root of the tree."""


class ConfigError(EngineError):
    """A setting cannot work; the message is one line with the remedy."""


class ModelLoadError(ConfigError):
    """The model cannot be loaded; the message names the file and the remedy."""


class InvalidRequest(EngineError):
    """A request's field is not acceptable.

    Attributes:
        param: the field's name, e.g. `temperature` or `messages[2].content`; None when the body as a whole is wrong.
        code: a short machine-readable reason, e.g. `integer_below_min_value`.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, does not fit the model's context."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class TransferRefused(InvalidRequest):
    """The request is said to be a leg of a transfer of K/V by nobody whom this engine believes."""


class QueueFull(EngineError):
    """The waiting queue is at its limit; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(EngineError):
    """An accepted request ended in an error."""


class OwnFailure(RequestFailed):
    """The request failed by itself: others in the same steps did not."""


class StepOutOfMemory(RequestFailed):
    """The device ran out of memory in one step; it can run others."""


class KVLoadFailed(RequestFailed):
    """The K/V of the prompt did not come, and it must not be computed here; another pair of engines may do it.

    Attributes:
        fault: whose doing it was, where that is known.
    """

    def __init__(self, message: str, fault: KvFault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class EngineDead(EngineError):
    """The engine core does not run any more."""
