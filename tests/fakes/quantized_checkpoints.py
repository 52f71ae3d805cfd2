"""Quantizes small checkpoints as llm-compressor and DeepSeek store them, with arithmetic of its own."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INPUT_ZERO = 9
"""Zero point of inputs with a fixed scale."""
_LARGEST = {"float": 448.0, "int": 127.0}


@dataclass(frozen=True)
class Recipe:
    """One way to store a matrix, and its words in config.json."""

    kind: str
    """float or int"""
    strategy: str
    inputs: str = "token"
    """none, token, tensor or group"""
    block: tuple[int, int] | None = None
    plain_fp8: bool = False
    """DeepSeek's spelling instead of compressed-tensors'."""
    zeros: bool = False
    """Inputs have zero points."""

    @property
    def scale_name(self) -> str:
        return "weight_scale_inv" if self.plain_fp8 and self.block is not None else "weight_scale"

    def config(self) -> dict[str, Any]:
        if self.plain_fp8:
            static = "static" if self.inputs == "tensor" else "dynamic"
            block = {"weight_block_size": list(self.block)} if self.block is not None else {}
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": static, **block}
        number = {"num_bits": 8, "type": self.kind, "symmetric": True}
        weights = {
            **number,
            "strategy": self.strategy,
            "dynamic": False,
            "block_structure": self.block and list(self.block),
        }
        inputs = None
        if self.inputs != "none":
            number["symmetric"] = not self.zeros
            inputs = {**number, "strategy": self.inputs, "dynamic": self.inputs != "tensor"}
            if self.inputs == "group" and self.block is not None:
                inputs["group_size"] = self.block[1]
        return {
            "quant_method": "compressed-tensors",
            "format": f"{self.kind}-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


MATRICES = tuple(
    f"{layer}.weight"
    for layer in (
        "_proj",
        "_with_mqa",
        "query_key_value",
        "self_attention.dense",
        "dense_h_to_4h",
        "dense_4h_to_h",
        "c_attn",
        "c_fc",
        "linear_left",
        "linear_right",
        "per_layer_input_gate",
        "_projection",
        "projections.0",
        "projections.1",
    )
)
"""Ends of the names of what is quantized."""


def quark(weight: Mapping[str, Any], inputs: Mapping[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Quark's words for FP8, per tensor and with fixed scales unless told otherwise."""
    number = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None, "symmetric": True}
    everywhere = {
        "weight": number | dict(weight),
        "input_tensors": None if inputs is None else number | dict(inputs),
        "output_tensors": None,
        "bias": None,
    }
    return {
        "quant_method": "quark",
        "global_quant_config": everywhere,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "algo_config": None,
        "softmax_quant_spec": None,
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "weight_format": "real_quantized", "pack_method": "reorder"},
    } | changes


def to_numbers(values: Tensor, kind: str) -> Tensor:
    """Nearest numbers of the format, in its type."""
    limit = _LARGEST[kind]
    values = values.clamp(-limit, limit)
    return values.round().to(torch.int8) if kind == "int" else values.to(torch.float8_e4m3fn)


def quantize(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Stored numbers, scales as the checkpoint writes them, and what the numbers stand for (float32)."""
    weight = weight.float()
    limit = _LARGEST[recipe.kind]
    if recipe.strategy == "block":
        assert recipe.block is not None
        rows, columns = recipe.block
        scale = torch.empty(math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns))
        whole = torch.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                area = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale[i, j] = weight[area].abs().max() / limit
                whole[area] = scale[i, j]
    elif recipe.strategy == "channel":
        scale = weight.abs().amax(1, keepdim=True) / limit
        whole = scale
    else:
        scale = (weight.abs().max() / limit).reshape(1)
        whole = scale
    numbers = to_numbers(weight / whole, recipe.kind)
    return numbers, scale, numbers.float() * whole


def rounded_inputs(x: Tensor, recipe: Recipe, input_scale: float = 0.05) -> Tensor:
    """The inputs that a layer computes with, in float64."""
    x = x.double()
    limit = _LARGEST[recipe.kind]
    if recipe.inputs == "none":
        return x
    if recipe.zeros:
        scale, zero = torch.tensor(input_scale, dtype=torch.float64), torch.tensor(float(INPUT_ZERO))
        if recipe.inputs == "token":
            least, largest = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
            scale = (largest - least) / 255
            zero = (-128 - least / scale).round()
        return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale
    if recipe.inputs == "tensor":
        scale = torch.tensor(input_scale, dtype=torch.float64)
    elif recipe.inputs == "token":
        scale = x.abs().amax(-1, keepdim=True) / limit
    else:
        assert recipe.block is not None
        return torch.cat(
            [rounded_inputs(part, Recipe(recipe.kind, "channel")) for part in torch.split(x, recipe.block[1], -1)], -1
        )
    return to_numbers((x / scale).float(), recipe.kind).double() * scale


def quantize_checkpoint(
    source: Path, target: Path, recipe: Recipe, *, config: Mapping[str, Any] | None = None, input_scale: float = 0.05
) -> Path:
    """Write `source` quantized to `target`, and beside it, `target`-plain, what the stored numbers stand for."""
    tensors = load_file(source / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(MATRICES):
            continue
        numbers, scale, meant = quantize(tensor, recipe)
        layer = name.removesuffix(".weight")
        stored |= {name: numbers, f"{layer}.{recipe.scale_name}": scale}
        if recipe.inputs == "tensor":
            stored[f"{layer}.input_scale"] = torch.tensor(input_scale)
        if recipe.inputs == "tensor" and recipe.zeros:
            stored[f"{layer}.input_zero_point"] = torch.tensor(INPUT_ZERO, dtype=torch.int8)
        plain[name] = meant.to(tensor.dtype)
    for folder, content in ((target, stored), (Path(f"{target}-plain"), plain)):
        shutil.copytree(source, folder)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((target / "config.json").read_text())
    settings["quantization_config"] = recipe.config() | dict(config or {})
    (target / "config.json").write_text(json.dumps(settings))
    return target


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_mxfp4(weight_EOI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [E, O, I / 32, 16], scales [E, O, I / 32], and the float32 numbers that they stand for."""
    blocks = weight_EOI.float().reshape(*weight_EOI.shape[:-1], -1, 32)
    power = (blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 113)
    scaled = blocks / 2.0 ** power[..., None]
    code = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    meant = _E2M1[code].copysign(scaled) * 2.0 ** power[..., None]
    code = (code + 8 * (scaled < 0)).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (power + 127).to(torch.uint8), meant.flatten(-2)


def mxfp4_checkpoint(source: Path, target: Path) -> Path:
    """Write gpt-oss `source` to `target` as it is published, and beside it, `target`-plain, what that stands for."""
    tensors = load_file(source / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scales, meant = to_mxfp4(tensor.mT)
            del stored[name]
            stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
            plain[name] = meant.mT.contiguous().to(tensor.dtype)
    for folder, content in ((target, stored), (Path(f"{target}-plain"), plain)):
        shutil.copytree(source, folder)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((target / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (target / "config.json").write_text(json.dumps(settings))
    return target
