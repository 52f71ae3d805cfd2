"""Golden vectors of the block hash: engines, routers and whoever else computes it must agree for ever."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.block_hash import BlockHash, PrefixScope, block_hash, extend_hashes, root_hash

TINY = PrefixScope("tiny")

ROOTS = [
    (PrefixScope(""), "81b062ca587d87c5f07a1bcea8911241a619822727832b95b2c4d056cfd071cf"),
    (TINY, "52d3780648771de0233c0c79d4b80fb0a1780c1efb70bc9ff2a5333eb195a688"),
    (PrefixScope("tiny", adapter=""), "ae30970c61ca23bd12c7ffdbff8f9dd4c982a661d6cc2e82c5eafd8e637612e6"),
    (PrefixScope("tiny", adapter="sql"), "f226a786fb50558f28c79f2fb525dd829463cac016a406f783a8adf36abe34d8"),
    (PrefixScope("tiny", salt="sql"), "668ebda3fb84af720f5d42435bcc8710b8d94571fcf859bf4e0b3d2de7fd2a03"),
    (PrefixScope("tiny", "sql", "tenant-1"), "7561984a4964b16cad9eecc7518807987c2139c8d36ebf4e8b1e12c06a4fe690"),
]
BLOCKS_OF_16 = [
    "08958df749bfe6871cdc2e83812dffb1f5cd058c6bd477537d2a28b341721e9e",
    "abff9dc22e5963432518de3af443b310190ff2da99dff06acafa95148afcb9ac",
    "f3b1a4fdd53ac8407bf1524a6a69851215217a1ed41c375405125c4e0c2e358f",
]
WIDE_TOKENS = [0, 1, 255, 65_536, 2**32 - 1]


def hashes_of(tokens: list[int], block_size: int, scope: PrefixScope = TINY) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root_hash(scope), tokens, block_size)
    return hashes


@pytest.mark.parametrize(("scope", "expected"), ROOTS)
def test_root_vectors(scope: PrefixScope, expected: str) -> None:
    assert root_hash(scope).hex() == expected


def test_chain_vectors() -> None:
    assert [block.hex() for block in hashes_of(list(range(50)), 16)] == BLOCKS_OF_16


def test_the_adapter_is_in_every_block() -> None:
    expected = "acc6ffe8b1b4078a1aa4df75f3e5c30021a68a59f58c56f7517b014c42e0a2ec"
    assert [block.hex() for block in hashes_of(list(range(16)), 16, PrefixScope("tiny", adapter="sql"))] == [expected]


def test_tokens_of_every_width() -> None:
    expected = "752eab5a05a3333013ecb1a0820b9901fdc4021c6748553cff4e6572356fe1d3"
    assert block_hash(root_hash(TINY), WIDE_TOKENS).hex() == expected


def test_the_encoding_is_the_documented_one() -> None:
    root = hashlib.sha256(b"pagefleet block hash v1" + struct.pack("<q4sqq6s", 4, b"tiny", -1, 6, b"tenant")).digest()
    assert root_hash(PrefixScope("tiny", salt="tenant")) == root
    block = hashlib.sha256(root + struct.pack("<5I", *WIDE_TOKENS)).digest()
    assert block_hash(BlockHash(root), WIDE_TOKENS) == block


def test_another_process_computes_the_same() -> None:
    program = (
        "from pagefleet_protocol.block_hash import *; h = []; "
        "extend_hashes(h, root_hash(PrefixScope('tiny')), range(48), 16); print(h[-1].hex())"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == BLOCKS_OF_16[-1]


def test_no_two_scopes_share_a_block() -> None:
    # Parts that would run into each other without lengths, None beside "", and the same text as adapter and as salt.
    scopes = [
        PrefixScope(model, adapter, salt)
        for model in ("m", "ma", "")
        for adapter in (None, "", "a", "ab")
        for salt in (None, "", "a", "b")
    ]
    blocks = {hashes_of([1, 2, 3, 4], 4, scope)[0] for scope in scopes}
    assert len(blocks) == len(scopes)


def test_a_lone_surrogate_in_a_salt_has_a_hash() -> None:
    assert root_hash(PrefixScope("tiny", salt="\ud800")) != root_hash(PrefixScope("tiny", salt="?"))


def test_equal_blocks_after_different_ones_differ() -> None:
    first = hashes_of([1, 1, 7, 7], 2)
    second = hashes_of([2, 2, 7, 7], 2)
    assert first[1] != second[1]


def test_a_partial_block_has_no_hash() -> None:
    assert hashes_of([1, 2, 3], 4) == []
    assert len(hashes_of([1, 2, 3, 4, 5], 4)) == 1


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_outside_32_bits_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_hash(root_hash(TINY), [token])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.data())
def test_extending_in_parts_equals_chaining_block_by_block(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    root = root_hash(TINY)
    parent, chained = root, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        chained.append(parent)
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, tokens[: data.draw(st.integers(0, len(tokens)))], block_size)
    extend_hashes(hashes, root, tokens, block_size)
    assert hashes == chained
