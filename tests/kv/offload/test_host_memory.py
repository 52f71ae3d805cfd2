from __future__ import annotations

import pytest
import torch
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.offload.build import HostMemory

FREE = 2**30


class Cudart:
    """Counts what is pinned."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 CUDA's name
        assert flags == 0
        self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 CUDA's name
        del self.pinned[address]
        return 0


def check_error(code: int) -> None:
    if code:
        raise RuntimeError("out of memory")


def test_plain_memory_is_written_and_read() -> None:
    memory = HostMemory(5000, FREE, pinned=False)
    assert len(memory.view) == 5000
    memory.view[4990:] = b"0123456789"
    assert bytes(memory.view[4995:]) == b"56789"
    memory.release()


def test_pinned_memory_is_pinned_until_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    memory = HostMemory(5000, FREE, pinned=True)
    assert list(cudart.pinned.values()) == [5000]
    memory.release()
    memory.release()
    assert cudart.pinned == {}


def test_memory_that_is_not_given_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(2))
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    with pytest.raises(KVConfigError, match="kv_offload_memory takes 5000 bytes"):
        HostMemory(5000, FREE, pinned=True)


def test_memory_that_a_container_has_not_is_refused_before_it_is_used() -> None:
    with pytest.raises(KVConfigError, match=r"takes 2\.50 GiB of memory and 1\.00 GiB are free: lower it"):
        HostMemory(5 * 2**29, FREE, pinned=False)
    HostMemory(2**20, FREE, pinned=False).release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_memory_is_known_to_torch() -> None:
    memory = HostMemory(1 << 20, FREE, pinned=True)
    assert torch.frombuffer(memory.view, dtype=torch.uint8).is_pinned()
    memory.release()
    assert not torch.frombuffer(memory.view, dtype=torch.uint8).is_pinned()
