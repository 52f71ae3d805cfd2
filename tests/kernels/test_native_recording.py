"""What was recorded does again what it did, over what its tensors hold by then; what cannot be is refused."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.native.dense import DenseProduct
from pagefleet_kernels.native.layers import NativeNorm
from pagefleet_kernels.native.library import CALLS
from pagefleet_kernels.native.recording import CannotRecordError, Recording, RecordingMemory
from torch import Tensor

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries

LIBRARIES = native_libraries()

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="the kernels of the CPU were not compiled")

WIDTH = 64


class Net:
    """Layers of a norm, a product and some operations of torch, over a table's rows."""

    def __init__(self, num_layers: int, dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(0)
        self.library = LIBRARIES[0]
        self.table = torch.randn(32, WIDTH, generator=rng).to(dtype)
        self.norm = NativeNorm(self.library, torch.randn(WIDTH, generator=rng), 1e-6, unit_offset=False)
        weight = (torch.randn(WIDTH, WIDTH, generator=rng) / 8).to(dtype)
        self.products = [DenseProduct(self.library, weight) for _ in range(num_layers)]

    def __call__(self, ids_T: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids_T, self.table)
        for product in self.products:
            y = product(self.norm(x), then="silu")
            top, _ = y.topk(2, dim=-1)
            half = torch.tensor(1.0).div_(2.0)
            x = product(y, then="add", other_TO=x) * half + top.sum(-1, keepdim=True)
            x[:, 0] = 1.0
        return x


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_it_computes_what_computing_anew_gives(data: st.DataObject) -> None:
    rows, dtype = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    net, memory = Net(data.draw(st.integers(1, 3)), dtype), RecordingMemory(1 << 20)
    ids_T = torch.zeros(rows, dtype=torch.int64)
    with torch.inference_mode():
        recordings = [Recording(net.library, memory, lambda: net(ids_T)) for _ in range(2)]
        for recording in recordings:
            assert torch.equal(recording.result, net(ids_T))
        for _ in range(3):
            ids_T.copy_(torch.tensor(data.draw(st.lists(st.integers(0, 31), min_size=rows, max_size=rows))))
            which = data.draw(st.sampled_from(recordings))
            assert torch.equal(which.run(), net(ids_T))


def test_it_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    with torch.inference_mode():
        Recording(LIBRARIES[0], RecordingMemory(4096), lambda: torch.ones(4) + 1)


def test_layers_work_in_the_memory_of_those_before() -> None:
    net, x = Net(40), torch.randn(4, WIDTH)

    def layers() -> Tensor:
        y = x
        for product in net.products:
            y = product(y)
        return y

    small = RecordingMemory(4096)  # three tensors of 1 KiB at once, and a product's own memory
    found = Recording(net.library, small, layers)
    x.mul_(-1.0)
    assert torch.equal(found.run(), layers())


def refused(reason: str, compute: Callable[[], Tensor], size: int = 1 << 20) -> None:
    library = LIBRARIES[0]
    before = [getattr(library, name) for name in CALLS]
    with pytest.raises(CannotRecordError, match=reason):
        Recording(library, RecordingMemory(size), compute)
    assert [getattr(library, name) for name in CALLS] == before, "the library is left as it was"


def test_what_differs_from_time_to_time_is_refused() -> None:
    x = torch.arange(4.0)
    refused("item|local_scalar", lambda: x * x[0].item())
    refused("local_scalar", lambda: x if x[0] > 0 else -x)
    refused("tolist", lambda: torch.tensor(x.tolist()))
    refused("numpy", lambda: torch.from_numpy(x.numpy()))
    refused("nonzero", x.nonzero)
    refused("bincount", lambda: torch.bincount(x.long()))
    refused("rand", lambda: x + torch.rand_like(x))
    refused("more than 0 MiB", lambda: torch.empty(4096), size=4096)


def test_what_other_threads_call_is_not_part_of_it() -> None:
    net = Net(1)
    ids_T, others = torch.tensor([1, 2]), []
    with torch.inference_mode():

        def with_another() -> Tensor:
            thread = threading.Thread(target=lambda: others.append(net(torch.tensor([5]))))
            thread.start()
            thread.join()
            return net(ids_T)

        recording = Recording(net.library, RecordingMemory(1 << 20), with_another)
        ids_T.copy_(torch.tensor([7, 8]))
        others[0].fill_(3.0)
        assert torch.equal(recording.run(), net(ids_T))
    assert (others[0] == 3.0).all()
