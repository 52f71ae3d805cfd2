"""What the connectors raise; the engine says it in its own words.

KVError
├── KVConfigError     a setting cannot work: one line that says what to do
└── TransfersDead     a thread of a connector has ended by a mistake of ours, so what it was to move never ends
"""

from __future__ import annotations


class KVError(Exception):
    """Root of the tree."""


class KVConfigError(KVError):
    """A setting cannot work; the message is one line with the remedy."""


class TransfersDead(KVError):
    """A thread that moves K/V does not run any more: the engine ends rather than wait for it."""
