"""A prompt as a chain of hashes: one for each full piece of 512 bytes, covering everything before it.

The text is the JSON of `messages` or `prompt` as the client wrote it: a growing conversation keeps its beginning, and
nothing has to be decoded. Hashes are CPython's keyed SipHash: fast, unpredictable for clients, different in every
process. They choose an engine and decide nothing else, so 64 bits are enough.
"""

from __future__ import annotations

from pagefleet_router.request_view import Pieces

PIECE_BYTES = 512
MAX_PIECES = 1024
"""512 kB are looked at; what differs only beyond shares its place."""


def hash_pieces(scope: tuple[object, ...], text: bytes) -> Pieces:
    """Return the chain of `text`.

    Args:
        scope: what must be equal for two requests to share a prefix: model, tenant, salt, tools.
        text: the prompt's bytes.
    """
    parent = hash(scope)
    pieces = []
    for start in range(0, min(len(text), PIECE_BYTES * MAX_PIECES) - PIECE_BYTES + 1, PIECE_BYTES):
        parent = hash((parent, text[start : start + PIECE_BYTES]))
        pieces.append(parent)
    return tuple(pieces)
