"""What the connectors raise; the engine says it in its own words.

KVError
├── KVConfigError     a setting cannot work: one line that says what to do
│   └── AddressTaken   somebody else listens there, which may pass
└── TransfersDead     a thread of a connector has ended by a mistake of ours, so what it was to move never ends
"""

from __future__ import annotations

import errno


class KVError(Exception):
    """Root of the tree."""


class KVConfigError(KVError):
    """A setting cannot work; the message is one line with the remedy."""


class AddressTaken(KVConfigError):
    """Somebody else listens at an address: by the next time it may be free."""


def cannot_listen(error: OSError, message: str) -> KVConfigError:
    """Return what to raise where an address cannot be listened on."""
    return (AddressTaken if error.errno == errno.EADDRINUSE else KVConfigError)(message)


class TransfersDead(KVError):
    """A thread that moves K/V does not run any more: the engine ends rather than wait for it."""
