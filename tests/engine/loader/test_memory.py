"""The arithmetic of memory, and what counts as free inside a container."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import can_pack
from pagefleet_engine.layers.quantization_scheme import on_load
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader import memory
from pagefleet_engine.loader.memory import check_memory, container_free_bytes, free_bytes, ranks_on, weight_bytes
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model

from tests.fakes.ranks import in_memory, on_ranks

CPU = torch.device("cpu")
GIB = 1024**3


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_count_every_parameter(tied: bool, make_checkpoint: Callable[..., Path]) -> None:
    arch = read_arch(make_checkpoint("llama", tie_word_embeddings=tied))
    place = Placement(torch.float32, CPU, use_kernels=False)
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    layer = attention + 3 * 64 * 160 + 2 * 64
    tables = 1 if tied and not can_pack(torch.float32, CPU) else 2
    assert weight_bytes(arch, build_model(arch, place).weights(), place) == 4 * (3 * layer + 64 + tables * 320 * 64)


def test_a_model_that_fits_exactly_is_loaded() -> None:
    check_memory(GIB, GIB, Placement(torch.float32, CPU, use_kernels=False))


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (torch.float32, "choose --dtype bfloat16, a smaller model, or a machine with more memory"),
        (torch.bfloat16, "choose a smaller model, or a machine with more memory"),
    ],
)
def test_a_model_that_does_not_fit_gets_the_arithmetic(dtype: torch.dtype, remedy: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        check_memory(15 * GIB, 4 * GIB, Placement(dtype, CPU, use_kernels=False))
    name = str(dtype).removeprefix("torch.")
    assert str(error.value) == f"the weights take 15.00 GiB in {name}, 4.00 GiB are free on cpu: {remedy}"


def test_on_a_gpu_eight_bits_may_help() -> None:
    place = Placement(torch.bfloat16, CPU, use_kernels=True)
    with pytest.raises(ModelLoadError, match="choose --quantization fp8, a smaller model, or a machine"):
        check_memory(15 * GIB, 4 * GIB, place)
    with pytest.raises(ModelLoadError, match="choose a smaller model, or a machine"):
        check_memory(15 * GIB, 4 * GIB, replace(place, quantization=on_load("fp8")))


def write_group(directory: Path, names: tuple[str, str], limit: str, used: int, stat: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(stat)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    names = ("memory.max", "memory.current")
    write_group(tmp_path, names, "1000", 700, "anon 500\ninactive_file 150\nactive_file 50\n")
    assert container_free_bytes(tmp_path) == 450
    write_group(tmp_path, names, "1000", 1200, "anon 1200\n")
    assert container_free_bytes(tmp_path) == 0
    write_group(tmp_path, names, "max", 700, "inactive_file 150\n")
    assert container_free_bytes(tmp_path) is None


def test_a_container_of_version_1(tmp_path: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write_group(tmp_path / "memory", names, "1000", 700, "inactive_file 1\ntotal_inactive_file 150\n")
    assert container_free_bytes(tmp_path) == 450


def test_no_container(tmp_path: Path) -> None:
    assert container_free_bytes(tmp_path) is None


def test_this_machine_has_some_memory() -> None:
    assert 0 < free_bytes(CPU) < 2**50


@pytest.mark.parametrize("meet", [in_memory, on_ranks])
def test_ranks_share_the_memory_of_their_own_machine_alone(
    meet: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_machine_free_bytes", lambda: 8 * GIB)  # others take and leave some all the time
    machines = ["node-a", "node-b", "node-a"]
    assert meet(3, lambda ranks: ranks_on(machines[ranks.index], ranks)) == [2, 1, 2]
    assert meet(2, lambda ranks: free_bytes(CPU, ranks)) == [4 * GIB] * 2
