"""What a stored block is called: its hash, and its group where that is not the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

from pagefleet_protocol.block_hash import HASH_BYTES, BlockHash

from pagefleet_kv.port import BlockRun

BlockKey = NewType("BlockKey", bytes)


def block_keys(hashes: Sequence[BlockHash], group: int = 0) -> list[BlockKey]:
    """Return the keys of blocks with these hashes in a KV group; equal tokens have one block in each group."""
    suffix = bytes([group]) if group else b""
    return [BlockKey(block_hash + suffix) for block_hash in hashes]


def keys_of_groups(hashes: Sequence[BlockHash], num_groups: int) -> list[BlockKey]:
    """Return the keys of blocks with these hashes in every group."""
    return [key for group in range(num_groups) for key in block_keys(hashes, group)]


def run_keys(runs: Sequence[BlockRun]) -> list[BlockKey]:
    """Return the keys of all blocks of `runs`, in their order."""
    return [key for run in runs for key in block_keys(run.hashes, run.group)]


def hash_of(key: bytes) -> bytes:
    """Return the 32 bytes of the hash."""
    return key[:HASH_BYTES]


def group_of(key: bytes) -> int:
    """Return the number of the KV group of a key, or of what a prefix cache calls a block."""
    return key[HASH_BYTES] if len(key) > HASH_BYTES else 0
