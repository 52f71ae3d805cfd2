"""Quantizes small checkpoints to numbers of a few bits, and packs these by the definitions of their formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.quantized_checkpoints import MATRICES


@dataclass(frozen=True)
class Packed:
    """One way to store a matrix, and its words in config.json."""

    format: str
    """pack-quantized, int-quantized, awq, gptq or gptq_v2"""
    bits: int = 4
    group: int | None = 32
    """None: one scale for a row"""
    zeros: bool = False
    ordered: bool = False
    """Inputs are in groups in act order."""
    inputs: str = ""
    """int or float: they are rounded to 8 bits per token."""

    def config(self) -> dict[str, Any]:
        size = -1 if self.group is None else self.group
        if self.format == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        if self.format.startswith("gptq"):
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": size,
                "sym": not self.zeros,
                "desc_act": self.ordered,
                "checkpoint_format": self.format,
            }
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": not self.zeros,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "actorder": "group" if self.ordered else None,
        }
        inputs = {"num_bits": 8, "type": self.inputs, "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if self.inputs else None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


@dataclass(frozen=True)
class Numbers:
    """A quantized matrix before it is packed."""

    codes_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor
    groups_I: Tensor

    def meant(self) -> Tensor:
        """float32 [O, I]"""
        groups = self.groups_I.long()
        return (self.codes_OI - self.zeros_OG[:, groups]).float() * self.scales_OG.float()[:, groups]


def quantize_packed(weight_OI: Tensor, packed: Packed, seed: int = 0) -> Numbers:
    """Nearest numbers; scales are float16, as such files have them."""
    weight_OI = weight_OI.float()
    inputs, numbers = weight_OI.shape[1], 1 << packed.bits
    size = packed.group or inputs
    groups = torch.arange(inputs) // size
    if packed.ordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    by_group = [weight_OI[:, groups == group] for group in range(inputs // size)]
    if packed.zeros:
        lows = torch.stack([part.amin(1).clamp(max=-1e-4) for part in by_group], 1)
        highs = torch.stack([part.amax(1).clamp(min=1e-4) for part in by_group], 1)
        scales = ((highs - lows) / (numbers - 1)).half().float()
        zeros = (-lows / scales).round().clamp(1, numbers - 1)
    else:
        largest = torch.stack([part.abs().amax(1).clamp(min=1e-4) for part in by_group], 1)
        scales = (largest / (numbers // 2 - 0.5)).half().float()
        zeros = torch.full_like(scales, numbers // 2)
    codes = (weight_OI / scales[:, groups] + zeros[:, groups]).round().clamp(0, numbers - 1)
    return Numbers(codes.int(), scales.half(), zeros.int(), groups.int())


def into_words(numbers: Tensor, bits: int) -> Tensor:
    """int32 [X, ceil(N * bits / 32)]: a row's numbers as one stream of bits, the lowest first."""
    rows = []
    for row in numbers.numpy().astype(np.uint8):
        stream = ((row[:, None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(-1)
        stream = np.pad(stream, (0, -len(stream) % 32))
        rows.append(np.packbits(stream, bitorder="little").view("<i4"))
    return torch.from_numpy(np.stack(rows))


def awq_words(numbers_XO: Tensor) -> Tensor:
    """int32 [X, O / 8]: the place of each of eight in its word is AutoAWQ's order map."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = torch.zeros(numbers_XO.shape[0], numbers_XO.shape[1] // 8, dtype=torch.int64)
    for place, output in enumerate(order):
        words |= numbers_XO[:, output::8].long() << (4 * place)
    return (words - ((words >> 31) << 32)).int()


def pack(numbers: Numbers, packed: Packed) -> dict[str, Tensor]:
    """The checkpoint's tensors of a layer, by the last part of their names."""
    bits, scales_GO, zeros_GO = packed.bits, numbers.scales_OG.t().contiguous(), numbers.zeros_OG.t()
    match packed.format:
        case "pack-quantized":
            stored = {
                "weight_packed": into_words(numbers.codes_OI, bits),
                "weight_scale": numbers.scales_OG,
                "weight_shape": torch.tensor(numbers.codes_OI.shape),
            }
            if packed.zeros:
                stored["weight_zero_point"] = into_words(zeros_GO, bits).t().contiguous()
            return stored | ({"weight_g_idx": numbers.groups_I} if packed.ordered else {})
        case "int-quantized":
            middle = 1 << (bits - 1)
            stored = {"weight": (numbers.codes_OI - middle).to(torch.int8), "weight_scale": numbers.scales_OG}
            zeros = {"weight_zero_point": (numbers.zeros_OG - middle).to(torch.int8)} if packed.zeros else {}
            return stored | zeros
        case "awq":
            return {"qweight": awq_words(numbers.codes_OI.t()), "qzeros": awq_words(zeros_GO), "scales": scales_GO}
        case _:
            less = 1 if packed.format == "gptq" else 0
            return {
                "qweight": into_words(numbers.codes_OI, bits).t().contiguous(),
                "qzeros": into_words(zeros_GO - less, bits),
                "scales": scales_GO,
                "g_idx": numbers.groups_I,
            }


def packed_checkpoint(
    source: Path, target: Path, packed: Packed, *, config: Mapping[str, Any] | None = None, kept: str = " "
) -> Path:
    """Write `source` packed to `target`, and beside it, `target`-plain, what the stored numbers stand for. Layers with
    `kept` in their names stay as they are."""
    tensors = load_file(source / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(MATRICES) or kept in name:
            continue
        numbers = quantize_packed(tensor, packed)
        layer = name.removesuffix(".weight")
        del stored[name]
        stored |= {f"{layer}.{kind}": part for kind, part in pack(numbers, packed).items()}
        plain[name] = numbers.meant().to(tensor.dtype)
    for folder, content in ((target, stored), (Path(f"{target}-plain"), plain)):
        shutil.copytree(source, folder)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((target / "config.json").read_text())
    settings["quantization_config"] = packed.config() | dict(config or {})
    (target / "config.json").write_text(json.dumps(settings))
    return target
