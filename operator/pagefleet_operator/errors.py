"""Every error of the operator that is somebody else's mistake or misfortune.

OperatorError
├── ManifestError      a file of InferenceServices cannot be used; `problems` lists all of what is wrong
├── StateDirError      the state folder is in use or cannot be written
├── PortError          an address cannot be listened on
├── CommandMissing     a program that the fleet starts is not installed
├── ChatError          something stands between `pagefleet chat` and an answer
│   └── EngineFailed   the engine of `pagefleet run` has ended (chat/engine_run.py)
├── SettingsError      a program was started with settings that cannot work
└── ClusterError       the API server was asked and did not do it
    ├── Conflict       409: somebody else was faster; look again, then try again
    ├── Refused        any other 4xx: the same request will be refused again; `status`, `reason` and `message` say why
    ├── Throttled      429: too many requests; `retry_after_s` says when to come back
    ├── Unavailable    no answer, or a 5xx: nobody's mistake, try again
    └── NotLeading     not asked at all: another operator may lead by now
"""

from __future__ import annotations

from collections.abc import Iterable


class OperatorError(Exception):
    """Root of the tree; the message is for the user and says what to do."""


class ManifestError(OperatorError):
    """A file or folder of InferenceServices has mistakes; `problems` holds one line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class StateDirError(OperatorError):
    """The folder for logs and records cannot be used."""


class PortError(OperatorError):
    """An address cannot be listened on."""


class CommandMissing(OperatorError):
    """A program that the fleet starts is not installed."""


class ChatError(OperatorError):
    """A server cannot be asked, refuses, or breaks off."""


class SettingsError(OperatorError):
    """A flag, or a file that it names, is missing or wrong."""


class ClusterError(OperatorError):
    """The API server did not do what it was asked.

    `status` is the HTTP status, 0 where there was no answer; `reason` is Kubernetes' word for it.
    """

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason


class Conflict(ClusterError):
    """The object changed, or came to be, since it was seen."""


class Refused(ClusterError):
    """The API server will answer the same the next time: forbidden, invalid, not found, over quota."""


class Throttled(ClusterError):
    """The API server asks for a pause of `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, status=429, reason="TooManyRequests")
        self.retry_after_s = retry_after_s


class Unavailable(ClusterError):
    """The API server cannot be reached, or fails."""


class NotLeading(ClusterError):
    """A write was held back because the lease may be another's."""
