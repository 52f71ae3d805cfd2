"""Quantizes small checkpoints as torchao and HQQ store them, by the definitions of their formats."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.quantized_checkpoints import MATRICES

GROUP = 32
PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}}
PER_TENSOR = {"_type": "PerTensor", "_data": {}}
PER_GROUP = {"_type": "PerGroup", "_data": {"group_size": GROUP}}
_TINY = torch.finfo(torch.float32).eps


def config_of(kind: str, version: int = 2, **data: Any) -> dict[str, Any]:
    """One of torchao's configurations, as it is written."""
    return {"_type": kind, "_version": version, "_data": data}


def section_of(default: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A quantization_config of torchao."""
    return {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": None, **more}


def _intx(bits: int, mapping: str) -> dict[str, Any]:
    dtype, asked = {"_type": "torch.dtype", "_data": f"int{bits}"}, {"_type": "MappingType", "_data": mapping}
    return config_of(
        "Int8DynamicActivationIntxWeightConfig",
        weight_dtype=dtype,
        weight_granularity=PER_GROUP,
        weight_mapping_type=asked,
    )


_CONFIGS = {
    "fp8": config_of("Float8WeightOnlyConfig", granularity=PER_ROW),
    "fp8-tensor": config_of("Float8WeightOnlyConfig", granularity=PER_TENSOR),
    "fp8-group": config_of("Float8WeightOnlyConfig", granularity=PER_GROUP),
    "int8": config_of("Int8WeightOnlyConfig", granularity=PER_ROW, group_size=None),
    "int8-tensor": config_of("Int8WeightOnlyConfig", granularity=PER_TENSOR),
    "int8-group": config_of("Int8WeightOnlyConfig", granularity=PER_GROUP),
    "int4": config_of("Int4WeightOnlyConfig", group_size=GROUP),
    "int4-tiles": config_of("Int4WeightOnlyConfig", group_size=GROUP),
    "intx3": _intx(3, "SYMMETRIC"),
    "intx4-zeros": _intx(4, "ASYMMETRIC"),
}
_CLASSES = {"fp8": "Float8Tensor", "int8": "Int8Tensor", "intx": "IntxUnpackedToInt8Tensor", "int4": "Int4Tensor"}


@dataclass(frozen=True)
class Stored:
    """One way to store a matrix: `hqq` and its bits, or one of torchao's."""

    form: str
    """A key of _CONFIGS, or hqq."""
    bits: int = 4

    def __str__(self) -> str:
        return f"{self.form}{self.bits}" if self.form == "hqq" else self.form

    def config(self) -> dict[str, Any]:
        if self.form != "hqq":
            return section_of(_CONFIGS[self.form])
        weights = {"nbits": self.bits, "group_size": GROUP, "axis": 1, "channel_wise": True}
        return {
            "quant_method": "hqq",
            "quant_config": {
                "weight_quant_params": weights,
                "scale_quant_params": None,
                "zero_quant_params": None,
                "offload_meta": False,
            },
            "skip_modules": ["lm_head"],
        }

    def store(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        """Tensors by the last part of their names, what torchao's metadata has of it, and what it stands for."""
        weight_OI = weight_OI.float()
        if self.form == "hqq":
            return self._hqq(weight_OI)
        if self.form.startswith("int4"):
            return self._int4(weight_OI)
        outputs, inputs = weight_OI.shape
        rows, columns = {"tensor": (outputs, inputs), "group": (1, GROUP)}.get(self.form.partition("-")[2], (1, inputs))
        if self.form.startswith("intx"):
            columns = GROUP
        blocks = weight_OI.view(outputs // rows, rows, inputs // columns, columns)
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
        size = torch.maximum(-least, most)
        zeros = torch.zeros_like(size)
        if self.form.startswith("fp8"):
            scales = size / 448
            numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        else:
            bits = int(self.form[4]) if self.form.startswith("intx") else 8
            scales = (size / ((1 << bits) - 1) * 2).clamp(min=_TINY)
            if self.form.endswith("zeros"):
                scales = ((most - least) / ((1 << bits) - 1)).clamp(min=_TINY)
                zeros = (-(1 << (bits - 1)) - least / scales).round()
            spread = scales[:, None, :, None], zeros[:, None, :, None]
            numbers = (blocks / spread[0] + spread[1]).round()
            numbers = numbers.clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).to(torch.int8)
        meant = (numbers.float() - zeros[:, None, :, None]) * scales[:, None, :, None]
        parts = {"_weight_qdata": numbers.view(outputs, inputs), "_weight_scale": scales}
        if not self.form.startswith("fp8"):
            parts["_weight_zero_point"] = zeros.to(torch.int8)
        said = {
            "_type": _CLASSES[self.form.partition("-")[0][:4].rstrip("-")],
            "_data": {"block_size": [rows, columns]},
        }
        return parts, said, meant.view(outputs, inputs)

    def _int4(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        (outputs, inputs), tiles = weight_OI.shape, self.form == "int4-tiles"
        if tiles:
            weight_OI = torch.nn.functional.pad(weight_OI, (0, -inputs % 1024, 0, -outputs % 8))
        codes_OGg, scales_OG, offsets_OG = _asymmetric(weight_OI, 4)
        middles_OG = (offsets_OG + 8 * scales_OG).bfloat16()
        scales_OG = scales_OG.bfloat16()
        meant = (codes_OGg - 8) * scales_OG.float()[..., None] + middles_OG.float()[..., None]
        codes = codes_OGg.flatten(1).to(torch.int32)
        said = {"block_size": [1, GROUP], "shape": [outputs, inputs]}
        if tiles:
            both = torch.stack((scales_OG, middles_OG), -1).transpose(0, 1).contiguous()
            parts = {"_weight_qdata": tile_words(codes), "_weight_scale_and_zero": both}
            return parts, {"_type": "Int4TilePackedTo4dTensor", "_data": said}, meant.flatten(1)[:outputs, :inputs]
        signed = codes - 8
        packed = (signed[:, ::2] & 15 | (signed[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
        parts = {"_weight_scale": scales_OG.t().contiguous(), "_weight_zero_point": middles_OG.t().contiguous()}
        return {"_weight_qdata": packed, **parts}, {"_type": "Int4Tensor", "_data": said}, meant.flatten(1)

    def _hqq(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        codes_OGg, scales_OG, offsets_OG = _asymmetric(weight_OI, self.bits)
        scales, zeros = scales_OG.half(), (-offsets_OG / scales_OG).half()
        meant = (codes_OGg - zeros.float()[..., None]) * scales.float()[..., None]
        rows = codes_OGg.flatten(0, 1).to(torch.int32)
        count = 10 if self.bits == 3 else 8 // self.bits
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % count))
        packed = torch.zeros_like(rows[: len(rows) // count])
        for part in torch.split(rows, len(packed)):  # the first ends in the uppermost bits
            packed = packed << self.bits | part
        parts = {
            "W_q": packed if self.bits == 3 else packed.to(torch.uint8),
            "scale": scales.view(-1, 1),
            "zero": zeros.view(-1, 1),
            "shape": torch.tensor(weight_OI.shape),
            "packing": torch.tensor([ord(letter) for letter in "4bit_u8"], dtype=torch.uint8),
        }
        parts |= {name: torch.tensor(n, dtype=torch.int32) for name, n in (("nbits", self.bits), ("axis", 1))}
        parts |= {f: torch.tensor(0, dtype=torch.uint8) for f in ("quant_scale", "quant_zero", "view_as_float")}
        return parts, {}, meant.flatten(1)


def _asymmetric(weight_OI: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [O, G, g] from 0 on, scales and what 0 stands for [O, G]."""
    groups_OGg = weight_OI.view(len(weight_OI), -1, GROUP)
    offsets_OG = groups_OGg.amin(-1)
    scales_OG = ((groups_OGg.amax(-1) - offsets_OG) / ((1 << bits) - 1)).clamp(min=1e-6)
    return ((groups_OGg - offsets_OG[..., None]) / scales_OG[..., None]).round(), scales_OG, offsets_OG


def tile_words(codes_OI: Tensor) -> Tensor:
    """int32 [O / 8, I / 128, 32, 4], number by number, as the definition of the tiles has it."""
    outputs, inputs = codes_OI.shape
    lane, word, place = torch.arange(32), torch.arange(4), torch.arange(8)
    row = (torch.arange(outputs // 8)[:, None] * 8 + lane // 4)[:, None, :, None, None]
    in_pair, in_half, in_tile = place % 2, place // 2 % 2, place // 4
    column = (
        (torch.arange(inputs // 128) * 128)[:, None, None, None]
        + (word * 32)[None, None, :, None]
        + (lane % 4 * 2)[None, :, None, None]
        + in_pair
        + 8 * in_half
        + 16 * in_tile
    )[None]
    numbers = codes_OI[row.expand(-1, *column.shape[1:]), column.expand(len(row), -1, -1, -1, -1)].long()
    words = (numbers << torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def write(folder: Path, tensors: dict[str, Tensor], said: dict[str, dict[str, Any]]) -> None:
    """A checkpoint of one file with torchao's metadata, where there is any."""
    metadata = {name: json.dumps(one) for name, one in said.items()}
    if said:
        metadata["tensor_names"] = json.dumps(list(said))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})


def stored_checkpoint(source: Path, target: Path, how: Stored, extra: tuple[str, ...] = ()) -> Path:
    """Write `source` quantized to `target`, and beside it, `target`-plain, what the stored numbers stand for.

    `extra`: ends of names of other matrices that are quantized besides.
    """
    tensors = load_file(source / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    said: dict[str, dict[str, Any]] = {name: {"_type": "Tensor"} for name in tensors if how.form != "hqq"}
    for name, tensor in tensors.items():
        if not name.endswith((*MATRICES, *extra)):
            continue
        parts, said_of, meant = how.store(tensor)
        del stored[name]
        stored |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
        said |= {name: said_of} if said_of else {}
        plain[name] = meant.to(tensor.dtype).contiguous()
    shutil.copytree(source, target)
    write(target, stored, said)
    shutil.copytree(source, Path(f"{target}-plain"))
    save_file(plain, Path(f"{target}-plain") / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((target / "config.json").read_text())
    settings["quantization_config"] = how.config()
    (target / "config.json").write_text(json.dumps(settings))
    return target
