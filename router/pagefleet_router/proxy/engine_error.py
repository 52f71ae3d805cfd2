"""An error answer of an engine's that has to be whole before anybody knows what it says."""

from __future__ import annotations

import msgspec
from pagefleet_protocol.kv_handoff import KV_FAULT, KvFault, read_kv_fault

from pagefleet_router.proxy.upstream import AnswerHead

KV_LOAD_FAILED = "kv_load_failed"
INVALID_HANDOFF = "invalid_handoff"
"""Codes of engines that were sent a leg of a transfer."""
_KV_FAULT = KV_FAULT.encode()
_MAX_BYTES = 64 * 1024


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Envelope(msgspec.Struct):
    error: _Error


class EngineError:
    """Collects one.

    Args:
        head: which came first.
    """

    __slots__ = ("body", "code", "head", "message")

    def __init__(self, head: AnswerHead) -> None:
        self.head = head
        self.body = b""
        self.code: str | None = None
        """What it is, once it is whole; None where the answer does not say it."""
        self.message = ""
        """The same in words."""

    @property
    def fault(self) -> KvFault | None:
        """Whose doing it is that K/V did not come; None where the engine does not say it."""
        return read_kv_fault(self.head.fields.get(_KV_FAULT, b"").decode("latin-1"))

    def take(self, body: bytes, complete: bool) -> bool:
        """Add bytes; returns whether it is whole, or longer than any error."""
        self.body += body
        if not complete and len(self.body) <= _MAX_BYTES:
            return False
        try:
            error = msgspec.json.decode(self.body, type=_Envelope).error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return True
        self.code, self.message = error.code, error.message
        return True
