"""Every error the engine raises for somebody else's mistake or misfortune.

EngineError
├── ConfigError            a setting is wrong: one line that says what to do; the process does not start
│   ├── AddressTaken       somebody else listens there, which may pass
│   └── ModelLoadError     the model folder is missing, damaged, unknown or too large
├── QueueFull              admission limit reached: HTTP 429
├── RequestFailed          the engine accepted the request but could not finish it: HTTP 500
│   ├── GrammarFailed      the form that was asked for could not be compiled, or followed to its end: HTTP 500
│   ├── StepOutOfMemory    the device had no room for the step that the request was in; it has for others
│   └── KVLoadFailed       its prompt's K/V did not come from the prefill engine: HTTP 503, before any token
├── ProfileRefused         no profile can begin or end now: HTTP 409
└── EngineDead             the engine core is gone: HTTP 503, the server exits

InvalidRequest             a request's field is wrong: HTTP 400, with the field's name; `pagefleet_protocol` has it
├── ContextTooLong         prompt (or prompt plus max_tokens) over the context: HTTP 400
└── TransferRefused        a router of another fleet sent it, or one that means another engine: HTTP 400
"""

from __future__ import annotations

from pagefleet_protocol.kv_handoff import KvFault
from pagefleet_protocol.openai_json import InvalidRequest
from pagefleet_protocol.printable import escape_control

__all__ = [
    "AddressTaken",
    "ConfigError",
    "ContextTooLong",
    "EngineDead",
    "EngineError",
    "GrammarFailed",
    "InvalidRequest",
    "KVLoadFailed",
    "ModelLoadError",
    "ProfileRefused",
    "QueueFull",
    "RequestFailed",
    "StepOutOfMemory",
    "TransferRefused",
]


class EngineError(Exception):
    """Root of the tree."""


class ConfigError(EngineError):
    """A setting cannot work; the message is one line with the remedy."""


class AddressTaken(ConfigError):
    """Somebody else listens at an address: by the next time it may be free."""


class ModelLoadError(ConfigError):
    """The model cannot be loaded; the message is one line that names the file and the remedy, whatever a file holds."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_control(message))


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, does not fit the model's context."""

    def __init__(self, message: str, param: str | None, code: str | None = "context_length_exceeded") -> None:
        super().__init__(message, param, code)


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


class GrammarFailed(OwnFailure):
    """The form that a request asked for could not be compiled in time, or became too complex on its way."""


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


class ProfileRefused(EngineError):
    """A profile cannot begin while another is recorded, or end where there is none; the message says so."""


class EngineDead(EngineError):
    """The engine core does not run any more."""
