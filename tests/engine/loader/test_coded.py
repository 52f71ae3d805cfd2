"""Checkpoints in codes of 4 bits, and of bitsandbytes, from the files to the logits; and what is said of bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear import Linear
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.loader.memory import weight_bytes
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_protocol.model_config.fields import ConfigFields
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.loader.test_packed import load, logits_in_pages, refusal, stored
from tests.fakes.checkpoints import edit, reference_model
from tests.fakes.coded_checkpoints import Coded, coded_checkpoint
from tests.fakes.dense_attention import logits
from tests.fakes.native_kernels import native_library

CPU = torch.device("cpu")
Make = Callable[..., Path]
NVFP4, NF4 = Coded("nvfp4-pack-quantized"), Coded("nf4", double=True)
FORMATS = [NVFP4, Coded("mxfp4-pack-quantized"), Coded("modelopt"), NF4, Coded("nf4"), Coded("fp4"), Coded("int8")]
O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.fixture
def coded(make_checkpoint: Make, tmp_path: Path) -> Callable[[Coded], Path]:
    return lambda how: coded_checkpoint(make_checkpoint("llama", intermediate_size=192), tmp_path / "coded", how)


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_logits_are_those_of_transformers_with_what_the_codes_mean(how: Coded, coded: Callable[[Coded], Path]) -> None:
    folder = coded(how)
    with torch.inference_mode():
        expected = reference_model(Path(f"{folder}-plain"))(torch.arange(3, 15)[None]).logits[0]
    torch.testing.assert_close(logits(load(folder)), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_compiled_kernels_give_the_logits_of_expanded_weights(how: Coded, coded: Callable[[Coded], Path]) -> None:
    """But for the rounding of inputs to 8 bits, and of bitsandbytes' floats."""
    folder, placement = coded(how), Placement(torch.float32, CPU, False, native=native_library())
    found, expected = logits(load_model(folder, read_arch(folder), placement, "auto", 0)), logits(load(folder))
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_experts_by_the_kernels_of_a_gpu_are_their_products(how: Coded, make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", moe_intermediate_size=64, intermediate_size=128)
    folder = coded_checkpoint(source, tmp_path / "coded", how)
    found, expected = logits_in_pages(load(folder, use_kernels=True)), logits(load(folder))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("how", [NF4, Coded("int8")], ids=str)
def test_experts_in_one_tensor_are_floats_in_checkpoints_of_bitsandbytes(
    how: Coded, make_checkpoint: Make, tmp_path: Path
) -> None:
    """It quantizes linear layers, and such experts are none."""
    folder = coded_checkpoint(make_checkpoint("granitemoe", intermediate_size=64), tmp_path / "coded", how)
    with torch.inference_mode():
        expected = reference_model(Path(f"{folder}-plain"))(torch.arange(3, 15)[None]).logits[0]
    torch.testing.assert_close(logits(load(folder)), expected, rtol=1e-3, atol=2e-3)


def test_the_estimate_is_what_is_kept(coded: Callable[[Coded], Path]) -> None:
    folder = coded(NVFP4)
    arch = read_arch(folder)
    tensors = load_file(folder / "model.safetensors")
    codes = sum(part.numel() for name, part in tensors.items() if name.endswith("packed"))
    scales = sum(part.numel() for name, part in tensors.items() if name.endswith("weight_scale"))
    rows = sum(len(part) for name, part in tensors.items() if name.endswith("weight_scale"))
    native = Placement(torch.float32, CPU, False, arch.quantization, native=native_library())
    for placement in (*(Placement(torch.float32, CPU, one, arch.quantization) for one in (False, True)), native):
        estimated = weight_bytes(arch, build_model(arch, placement).weights(), placement)
        plain = replace(placement, quantization=None)
        expanded = weight_bytes(arch, build_model(arch, plain).weights(), plain)
        kept = 8 * codes
        if placement.use_kernels or placement.native is not None:
            kept = codes + (scales if placement.use_kernels else 2 * scales) + 4 * rows
        assert estimated == expanded - 8 * codes + kept


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_a_ranks_part_is_that_of_the_whole(how: Coded) -> None:
    """For row-parallel and column-parallel layers alike, by slots alone."""
    quantization = read_quantization(ConfigFields({"quantization_config": how.config()}, "config.json"))
    assert quantization is not None
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) / 9
    parts, meant = how.store(weight)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    for inputs, outputs in (
        (shard_of(128), Shard(64, (range(32, 64),))),
        (Shard(128, (range(64, 128),)), shard_of(64)),
    ):
        for use_kernels in (False, True):
            layer = Linear(
                inputs, (outputs,), False, Placement(torch.float32, CPU, use_kernels, quantization, "o_proj")
            )
            for kind, tensor in as_slots(parts).items():
                if kind in dict(layer.weights()):
                    dict(layer.weights())[kind].fill(0, tensor)
            rows, columns = (list(shard.ranges[0]) for shard in (outputs, inputs))
            expected = x[:, columns] @ meant[rows][:, columns].t()
            torch.testing.assert_close(layer(x[:, columns].contiguous()), expected, rtol=1e-3, atol=2e-3)


def as_slots(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the loader makes of bitsandbytes' tensors; others as they are."""
    if "SCB" in parts:
        return {"weight": parts["weight"], "weight_scale": parts["SCB"] / 127}
    if "weight.absmax" not in parts:
        return parts
    absmax = parts["weight.absmax"]
    table = next(name for name in parts if "quant_state" in name).rpartition("_")[2]
    if absmax.dtype == torch.uint8:
        state = next(part for name, part in parts.items() if "quant_state" in name)
        offset = json.loads(bytes(state.tolist()))["nested_offset"]
        absmax = parts["weight.nested_quant_map"][absmax.int()] * parts["weight.nested_absmax"] + offset
    return {"weight": parts["weight"].view(64, 64), f"weight_absmax_{table}": absmax.view(64, -1)}


def test_ranks_do_not_cut_groups() -> None:
    quantization = read_quantization(ConfigFields({"quantization_config": NF4.config()}, "config.json"))
    place = Placement(torch.float32, CPU, True, quantization, "o_proj")
    with pytest.raises(ModelLoadError, match=r"o_proj: 1 ranks would cut groups of 64 numbers"):
        Linear(Shard(128, (range(32),)), (64,), False, place)
    with pytest.raises(ModelLoadError, match=r"o_proj has 80 inputs, which groups of 64 do not divide"):
        Linear(80, (64,), False, place)


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_dummy_weights(how: Coded, coded: Callable[[Coded], Path]) -> None:
    folder = coded(how)
    (folder / "model.safetensors").unlink()
    out = logits(load_model(folder, read_arch(folder), Placement(torch.float32, CPU, False), "dummy", 1))
    assert out.isfinite().all()
    assert out.std() > 1e-3


def test_scales_that_are_none(coded: Callable[[Coded], Path]) -> None:
    folder = coded(NVFP4)
    good = stored(folder, f"{O_PROJ}.weight_scale")
    bad = good.view(torch.uint8).clone()
    bad[3, 1] = 0x7F
    edit(folder, {f"{O_PROJ}.weight_scale": bad.view(torch.float8_e4m3fn)})
    assert f"{O_PROJ}.weight_scale holds no usable scale: download the checkpoint again" in refusal(folder)
    edit(folder, {f"{O_PROJ}.weight_scale": good, f"{O_PROJ}.weight_global_scale": torch.zeros(1)})
    assert f"{O_PROJ}.weight_global_scale is 0.0, no scale" in refusal(folder)
    edit(folder, {f"{O_PROJ}.weight_global_scale": None})
    assert f"the weights lack {O_PROJ}.weight_global_scale" in refusal(folder)


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("weight.absmax", None, "its scales (absmax) are missing"),
        ("weight.nested_absmax", None, "scales of its scales (nested_absmax) are missing"),
        ("weight.nested_absmax", torch.zeros(0), "scales of its scales (nested_absmax) are too few"),
        ("weight.nested_quant_map", torch.zeros(3), "scales of its scales (nested_absmax) are too few"),
        ("weight", None, "the weights lack model.layers.0.self_attn.o_proj.weight"),
        ("weight.quant_map", torch.ones(16), "a table of its own (quant_map) is not run"),
        ("weight.quant_map", torch.ones(0), "a table of its own (quant_map) is not run"),
        ("weight", torch.zeros(9, 1, dtype=torch.uint8), "holds 9 bytes, and 64 x 64 numbers of 4 bits are 2048"),
        ("weight.absmax", torch.zeros(9, dtype=torch.uint8), "9 scales, 64 belong to its numbers"),
        ("weight.absmax", torch.zeros(0, dtype=torch.uint8), "0 scales, 64 belong to its numbers"),
        ("weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8), "is no JSON"),
    ],
)
def test_bitsandbytes_that_does_not_fit(
    part: str, change: Tensor | None, said: str, coded: Callable[[Coded], Path]
) -> None:
    folder = coded(NF4)
    edit(folder, {f"{O_PROJ}.{part}": change})
    assert said in refusal(folder)


def test_codes_of_another_table_than_config_json_says(coded: Callable[[Coded], Path]) -> None:
    folder = coded(NF4)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    (folder / "config.json").write_text(json.dumps(config))
    said = refusal(folder)
    assert said.endswith(".weight is in nf4, and config.json's bnb_4bit_quant_type is fp4: give nf4 there")


def test_a_block_size_that_is_not_run(coded: Callable[[Coded], Path]) -> None:
    folder = coded(NF4)
    state = json.dumps({"quant_type": "nf4", "blocksize": 128, "shape": [64, 64]}).encode()
    name = f"{O_PROJ}.weight.quant_state.bitsandbytes__nf4"
    edit(folder, {name: torch.frombuffer(bytearray(state), dtype=torch.uint8)})
    assert "has 64 inputs and scales for 128 numbers: whole rows of 64 are run" in refusal(folder)


def test_float_weights_that_are_said_to_be_in_4_bits(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = tmp_path / "coded"
    folder.mkdir()
    source = make_checkpoint("llama", intermediate_size=192)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": NF4.config()}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    said = refusal(folder)
    assert "the weights have model.layers.0.mlp.down_proj.weight, " in said
    assert "in a float type, and config.json a quantized one" in said
