"""Gathering, summing and scattering of a GPU's pages beside the steps."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.worker.kv_pages import DevicePages, HostPages
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies, DevicePool, folded


def test_pages_of_the_host_are_no_devices() -> None:
    assert not isinstance(HostPages(torch.zeros(4, 2, 8)), DevicePool)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_go_from_one_pool_to_another_with_the_sum_that_a_cpu_finds() -> None:
    content = torch.randn(64, 2, 3, 16, dtype=torch.float32)
    source, target = content.to("cuda", torch.bfloat16), torch.zeros(64, 2, 3, 16, dtype=torch.bfloat16, device="cuda")
    from_pages, to_pages = DevicePages(source), DevicePages(target)
    assert isinstance(from_pages, DevicePool)
    blocks, into = [3, 4, 9, 1], [7, 30, 31, 2]
    slot_bytes = 8 * from_pages.bytes_per_block
    sending, receiving = DeviceCopies(from_pages, slot_bytes), DeviceCopies(to_pages, slot_bytes)
    slot = sending.slots(1)[0]
    torch.cuda.synchronize()
    sending.gather(blocks, slot)
    total = sending.total(slot, 4 * from_pages.bytes_per_block)
    total.mark.wait()
    words = source[blocks].cpu().view(-1).view(torch.int64)
    mixed = words ^ ((words >> 32) & 0xFFFF_FFFF)
    assert total.value() == int((mixed * torch.arange(1, 2 * len(words), 2)).sum())
    assert 0 <= folded(total.value()) < 1 << 32
    receiving.scatter(slot, into)
    receiving.marked().wait()
    assert torch.equal(target[into], source[blocks])
    assert int((target.flatten(1) != 0).any(1).sum()) == 4
    assert sending.free_bytes() > 0
