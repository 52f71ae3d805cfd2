"""Every error of the operator that is somebody else's mistake or misfortune.

OperatorError
├── ManifestError      a file of InferenceServices cannot be used; `problems` lists all of what is wrong
├── StateDirError      the state folder is in use or cannot be written
├── PortError          an address cannot be listened on
├── CommandMissing     a program that the fleet starts is not installed
└── ChatError          something stands between `pagefleet chat` and an answer
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
