"""How far an engine is that has not answered a request yet: what `/readyz` says of it beside its 503.

{"error": {...}, "loading": {"phase": "weights", "done": 1503238553, "total": 3221225472, "seconds": 4.2}}
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagefleet_protocol.errors import ErrorBody, error_envelope

LoadPhase = Literal[
    "starting",
    "imports",
    "download",
    "verification",
    "config",
    "tokenizer",
    "weights",
    "compile",
    "profile",
    "kernels",
    "kv_pool",
    "graphs",
    "warm_up",
    "other",
]
"""In about the order in which they come; `other` is between two that have a name."""

LOADING = "engine_loading"
"""Code of the error."""

_WORDS: dict[LoadPhase, str] = {
    "starting": "the process starts",
    "imports": "imports libraries",
    "download": "downloads the model",
    "verification": "verifies the model's files",
    "config": "reads the model's configuration",
    "tokenizer": "reads the tokenizer",
    "weights": "reads weights",
    "compile": "compiles layers",
    "profile": "measures the largest step",
    "kernels": "compiles kernels",
    "kv_pool": "reserves the KV cache",
    "graphs": "captures graphs",
    "warm_up": "warms up",
    "other": "gets ready",
}
_IN_BYTES = ("download", "verification", "weights")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class LoadProgress(msgspec.Struct, frozen=True):
    """What an engine does before it is ready."""

    phase: LoadPhase = "starting"
    done: int = 0
    """Of the phase's work: bytes of weights or of a download, graphs captured."""
    total: int = 0
    """All of the phase's work; 0 where it is not counted."""
    seconds: float = 0.0
    """Since the process began to load."""
    bytes_per_second: float = 0.0
    """Of a download, in the last seconds."""

    @property
    def share(self) -> float | None:
        """How much of the phase's work is done, 0 to 1; None where it is not counted."""
        return min(1.0, self.done / self.total) if self.total > 0 else None

    def describe(self) -> str:
        """Say it in words, e.g. `reads weights: 46%, 1.4 of 3.0 GiB`."""
        words = _WORDS[self.phase]
        if self.share is None:
            return words
        if self.phase in _IN_BYTES:
            per_second = int(self.bytes_per_second)
            speed = f", {amount(per_second, per_second).partition(' of ')[2]}/s" if per_second else ""
            return f"{words}: {self.share:.0%}, {amount(self.done, self.total)}{speed}"
        return f"{words}: {self.done} of {self.total}"


def amount(done: int, total: int) -> str:
    """Return both numbers of bytes in the unit that fits the second, e.g. `1.4 of 3.0 GiB`."""
    power = min(max(0, total.bit_length() - 1) // 10, len(_UNITS) - 1)
    digits = 1 if power else 0
    return f"{done / 1024**power:.{digits}f} of {total / 1024**power:.{digits}f} {_UNITS[power]}"


class LoadingAnswer(msgspec.Struct, frozen=True):
    """The whole answer, with status 503."""

    error: ErrorBody
    loading: LoadProgress


def encode_loading(progress: LoadProgress) -> bytes:
    """Return the answer's body."""
    error = error_envelope(503, f"The engine is not ready yet ({progress.describe()}).", code=LOADING).error
    return msgspec.json.encode(LoadingAnswer(error, progress))


def decode_loading(body: bytes) -> LoadProgress | None:
    """Return what an answer says; None where it says nothing of loading."""
    try:
        return msgspec.json.decode(body, type=LoadingAnswer).loading
    except msgspec.MsgspecError:
        return None
