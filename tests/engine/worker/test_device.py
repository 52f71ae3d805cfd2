"""Device, threads and memory of this machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pagefleet_engine.cores import usable_cores
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker import device
from pagefleet_engine.worker.device import (
    MAX_KERNELS,
    keep_kernels,
    limit_kernel_caches,
    probe_memory,
    resolve_device,
    set_num_threads,
)
from pagefleet_engine.worker.runner_factory import allocate_kv_pool
from pagefleet_kernels.layout import KVLayout


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="--device cpu"):
        resolve_device("cuda")


@pytest.mark.usefixtures("same_threads_after")
def test_threads_are_those_asked_for_or_one_per_core_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert set_num_threads(3) == torch.get_num_threads() == 3
    assert set_num_threads(None) == torch.get_num_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # a list for nested regions, which torch does not have
    assert set_num_threads(None) == usable_cores()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert set_num_threads(None) == torch.get_num_threads() == usable_cores()
    with pytest.raises(ConfigError, match="num_threads is 0"):
        set_num_threads(0)


def test_kernels_are_kept_up_to_a_number_that_the_environment_may_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "")  # so that what is set is taken back
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    limit_kernel_caches()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert os.environ["LRU_CACHE_CAPACITY"] == str(MAX_KERNELS)


FAULTS_OF_USING_AGAIN = """
import resource, torch
from pagefleet_engine.worker.device import keep_step_memory
keep_step_memory()
faults = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs a C library that can be told")
def test_memory_that_a_step_has_freed_is_kept_for_the_next() -> None:
    found = subprocess.run([sys.executable, "-c", FAULTS_OF_USING_AGAIN], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 200, "64 MB of new pages are 16,000 faults"


def test_a_cpu_offers_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda *_: 12345)
    memory = probe_memory(torch.device("cpu"))
    assert (memory.total, memory.free) == (12345, 12345)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_pool_is_zero_writable_and_of_the_layouts_shape(dtype: torch.dtype) -> None:
    layout = KVLayout(num_blocks=5, num_layers=2, num_kv_heads=3, block_size=4, head_dim=8)
    pool = allocate_kv_pool(layout, dtype, torch.device("cpu"))
    assert pool.shape == layout.shape
    assert pool.dtype == dtype
    assert pool.is_contiguous()
    assert pool.data_ptr() % 4096 == 0
    assert not pool.any()
    pool[4, 1, 1] = 7.0
    assert float(pool.float().sum()) == 7.0 * 3 * 4 * 8


def test_a_large_pool_takes_memory_only_where_it_is_written() -> None:
    layout = KVLayout(num_blocks=1 << 16, num_layers=4, num_kv_heads=8, block_size=16, head_dim=64)
    before = _resident_bytes()
    pool = allocate_kv_pool(layout, torch.bfloat16, torch.device("cpu"))
    pool[0] = 1.0
    assert pool.numel() * 2 > 7 * 1024**3
    assert _resident_bytes() - before < 64 * 1024**2


def test_a_pool_that_is_to_hold_its_memory_takes_it_at_once() -> None:
    layout = KVLayout(num_blocks=1 << 8, num_layers=4, num_kv_heads=8, block_size=16, head_dim=64)
    before = _resident_bytes()
    pool = allocate_kv_pool(layout, torch.float32, torch.device("cpu"), held=True)
    assert _resident_bytes() - before > pool.numel() * 2
    assert not pool.any()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_compiled_kernels_are_kept_where_the_environment_does_not_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    keep_kernels(tmp_path / "kernels")
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    assert not (tmp_path / "kernels").exists()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "file").write_text("")
    keep_kernels(tmp_path / "file" / "kernels")
    assert "TRITON_CACHE_DIR" not in os.environ
    keep_kernels(tmp_path / "kernels")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kernels")
    assert (tmp_path / "kernels").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("flaw", ["others write", "another owner", "read-only"])
def test_kernels_are_not_kept_where_others_may_put_theirs(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found in the folder runs in this process."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o770)
    if flaw == "others write":
        folder.chmod(0o777)
    elif flaw == "another owner":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a volume that is mounted so
    keep_kernels(folder)
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.undo()
    folder.chmod(0o770)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")  # put back as it was, whatever is set below
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_kernels(folder)
    assert os.environ["TRITON_CACHE_DIR"] == str(folder), "a cluster gives a volume's folders to a group"
