"""The chained hash of a block of tokens: what prefix caching and prefix routing agree on.

A block's hash covers every token before it, the model, the adapter and the tenant's salt. It is SHA-256 over an
unambiguous encoding with a fixed seed, so that any process computes the same value, and wide enough (256 bit) that
equal hashes are taken as equal tokens without comparing them.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 32

_SEED = b"pagefleet block hash v1"


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """What must be equal, apart from tokens, for two requests to share cached blocks."""

    model: str
    adapter: str | None = None
    salt: str | None = None


def root_hash(scope: PrefixScope) -> BlockHash:
    """Return the parent of a request's first block."""
    digest = hashlib.sha256(_SEED)
    for part in (scope.model, scope.adapter, scope.salt):
        encoded = b"" if part is None else part.encode("utf-8", "surrogatepass")
        # None and "" must differ, and no part may run into the next one.
        digest.update((-1 if part is None else len(encoded)).to_bytes(8, "little", signed=True))
        digest.update(encoded)
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash one full block: SHA-256 over the parent's 32 bytes and the token ids as little-endian uint32.

    Raises:
        OverflowError: a token id does not fit 32 bits.
    """
    return BlockHash(hashlib.sha256(parent + _encode(tokens)).digest())


def extend_hashes(hashes: list[BlockHash], root: BlockHash, tokens: Sequence[int], block_size: int) -> None:
    """Append to `hashes` those of the full blocks of `tokens` that it does not hold yet.

    `hashes` must hold a prefix of the same sequence's hashes; a trailing partial block has no hash.
    """
    start = len(hashes) * block_size
    stop = len(tokens) - len(tokens) % block_size
    if start >= stop:
        return
    parent = hashes[-1] if hashes else root
    encoded = _encode(tokens[start:stop])
    step = 4 * block_size
    for offset in range(0, len(encoded), step):
        parent = BlockHash(hashlib.sha256(parent + encoded[offset : offset + step]).digest())
        hashes.append(parent)


def _encode(tokens: Sequence[int]) -> bytes:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
