"""Engines have equal shapes exactly where one can go on with the other's K/V."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig
from pagefleet_engine.engine_core.kv_shape import SAMPLED_BYTES, LoadedModel, kv_shape
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.models.config_file import read_arch
from pagefleet_protocol.kv_blob import KvShape

from tests.fakes.small_model import write_small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_small_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    return folder


def shape(
    folder: Path, *, config: dict[str, Any] | None = None, cache: dict[str, Any] | None = None, **model: Any
) -> KvShape:
    loaded = LoadedModel(folder, read_arch(folder), "name", "bfloat16", "bfloat16", 256)
    settings = EngineConfig(model=ModelConfig(model=str(folder), **(config or {})), cache=CacheConfig(**(cache or {})))
    return kv_shape(settings, dataclasses.replace(loaded, **model))


def test_two_starts_of_one_engine_are_equal(folder: Path, tmp_path: Path) -> None:
    assert shape(folder) == shape(folder)
    assert shape(folder).compatibility == shape(folder, cache={"num_kv_blocks": 7}).compatibility
    other = write_small_model(tmp_path / "copy")
    (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert shape(other) == shape(folder), "where a model lies does not matter"


def test_facts_are_those_of_the_model(folder: Path) -> None:
    facts = shape(folder, cache={"block_size": 32})
    assert (facts.block_size, facts.num_layers, facts.num_kv_heads, facts.head_dim) == (32, 2, 2, 8)
    assert len(facts.model) == 64


def change_byte(folder: Path, at: int) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def change_arch(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 20000.0}))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_byte(folder, 0),
        lambda folder: change_byte(folder, SAMPLED_BYTES - 1),
        lambda folder: change_byte(folder, -1),
        lambda folder: change_byte(folder, -SAMPLED_BYTES),
        lambda folder: (folder / "model.safetensors").write_bytes(bytes(9)),
        change_arch,
    ],
    ids=["header", "first part", "last byte", "last part", "size", "arch"],
)
def test_another_checkpoint_of_the_same_architecture_differs(folder: Path, change: Callable[[Path], Any]) -> None:
    before = shape(folder)
    change(folder)
    assert shape(folder).compatibility != before.compatibility


def test_what_else_makes_a_difference(folder: Path) -> None:
    shapes = [
        shape(folder),
        shape(folder, scope="other"),
        shape(folder, compute_dtype="float32"),
        shape(folder, cache_dtype="float8_e4m3fn"),
        shape(folder, cache={"block_size": 32}),
        shape(folder, config={"quantization": "fp8"}),
        shape(folder, config={"load_format": "dummy"}),
        shape(folder, config={"load_format": "dummy", "seed": 1}),
    ]
    assert len({each.compatibility for each in shapes}) == len(shapes)


def test_a_length_counts_only_where_keys_depend_on_it(folder: Path) -> None:
    assert shape(folder, max_model_len=128) == shape(folder, max_model_len=256)
    arch = read_arch(folder)
    rope = RopeParameters(
        rope_type="longrope", original_max_position=64, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4
    )
    longrope = dataclasses.replace(arch, ropes=(rope,))
    assert shape(folder, arch=longrope, max_model_len=32) != shape(folder, arch=longrope, max_model_len=128)
