"""The KV pool as bytes: whole blocks in and out, in any order, also while others are written."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.worker.kv_pages import HostPages, make_kv_pages
from pagefleet_kernels.layout import KVLayout

LAYOUT = KVLayout(num_blocks=8, num_layers=2, num_kv_heads=2, block_size=4, head_dim=8)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def make_pool(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(LAYOUT.num_blocks, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1)
    return numbers.expand(LAYOUT.shape).contiguous().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_is_all_of_its_layers(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    pages = make_kv_pages(pool)
    assert pages.bytes_per_block == LAYOUT.bytes_per_block(dtype)
    assert pages.host is not None
    assert len(pages.host) == 8 * pages.bytes_per_block
    size = pages.bytes_per_block
    assert bytes(pages.host[3 * size : 4 * size]) == bytes(pool[3].flatten().view(torch.uint8).numpy())


@pytest.mark.parametrize("blocks", [[3], [1, 2, 3], [5, 1, 2, 7, 0], [7, 6, 5]])
def test_what_is_read_can_be_written_elsewhere(blocks: list[int]) -> None:
    pool, other = make_pool(torch.bfloat16), torch.zeros(LAYOUT.shape, dtype=torch.bfloat16)
    pages, target = make_kv_pages(pool), make_kv_pages(other)
    buffer = memoryview(bytearray(len(blocks) * pages.bytes_per_block))
    copy = pages.read(blocks, buffer)
    copy.wait()
    assert copy.done()
    places = list(range(len(blocks), 0, -1))
    target.write(buffer.toreadonly(), places).wait()  # bytes from a network need not be writable
    for block, place in zip(blocks, places, strict=True):
        assert torch.equal(other[place], pool[block])
    untouched = [place for place in range(8) if place not in places]
    assert not other[untouched].any()


def test_host_is_the_pool_itself() -> None:
    pool = make_pool(torch.float32)
    pages = HostPages(pool)
    pages.host[: pages.bytes_per_block] = bytes(pages.bytes_per_block)
    assert not pool[0].any()
    assert not pages.host.readonly


def test_a_buffer_of_another_length_is_refused() -> None:
    pages = HostPages(make_pool(torch.float32))
    with pytest.raises(ValueError, match="reshape"):
        pages.read([1, 2], memoryview(bytearray(pages.bytes_per_block)))
