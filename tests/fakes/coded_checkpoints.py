"""Quantizes small checkpoints to codes of 4 bits, and bitsandbytes' 8, by the definitions of their formats."""

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

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = {
    "e2m1": torch.tensor([*E2M1, *(-value for value in E2M1)]),
    "nf4": torch.tensor(
        [
            *(-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0),
            *(0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0),
        ]
    ),
    "fp4": torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12,
}


@dataclass(frozen=True)
class Coded:
    """One way to store a matrix."""

    format: str
    """nvfp4-pack-quantized, mxfp4-pack-quantized, modelopt, nf4, fp4 or int8."""
    double: bool = False
    """Scales are quantized too."""

    @property
    def group(self) -> int:
        return {"nvfp4-pack-quantized": 16, "modelopt": 16, "mxfp4-pack-quantized": 32}.get(self.format, 64)

    def config(self) -> dict[str, Any]:
        match self.format:
            case "modelopt":
                return {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
            case "nf4" | "fp4" | "int8":
                bits = "load_in_8bit" if self.format == "int8" else "load_in_4bit"
                table = {} if self.format == "int8" else {"bnb_4bit_quant_type": self.format}
                return {"quant_method": "bitsandbytes", bits: True, "llm_int8_skip_modules": None, **table}
        four = {"num_bits": 4, "type": "float", "group_size": self.group, "symmetric": True}
        inputs = {**four, "dynamic": "local"} if self.format.startswith("nvfp4") else None
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": four, "input_activations": inputs}},
            "ignore": ["lm_head"],
        }

    def store(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The checkpoint's tensors of a layer by the last part of their names, and what they stand for, float32."""
        weight_OI = weight_OI.float()
        if self.format == "int8":
            rows = weight_OI.abs().amax(1)
            numbers = (weight_OI / rows[:, None] * 127).round()
            format_ = torch.tensor(0, dtype=torch.uint8)
            stored = {"weight": numbers.to(torch.int8), "SCB": rows, "weight_format": format_}
            return stored, numbers * rows[:, None] / 127
        by_group = weight_OI.view(len(weight_OI), -1, self.group)
        largest = by_group.abs().amax(-1)
        scales, more, offset = self._scales(largest)
        values = _VALUES[self.format if self.format in ("nf4", "fp4") else "e2m1"]
        codes = ((by_group / scales[..., None])[..., None] - values).abs().argmin(-1)
        meant = (values[codes] * scales[..., None]).flatten(1)
        even, odd = codes.to(torch.uint8).view(len(codes), -1, 2).unbind(-1)
        if self.format not in ("nf4", "fp4"):
            name = "weight" if self.format == "modelopt" else "weight_packed"
            return {name: even | odd << 4, **more}, meant
        said: dict[str, Any] = {"quant_type": self.format, "blocksize": 64, "shape": list(weight_OI.shape)}
        if self.double:
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        state = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        more |= {"weight.quant_map": values.clone(), f"weight.quant_state.bitsandbytes__{self.format}": state}
        return {"weight": (even << 4 | odd).view(-1, 1), **more}, meant

    def _scales(self, largest: Tensor) -> tuple[Tensor, dict[str, Tensor], float]:
        if self.format == "mxfp4-pack-quantized":
            power = largest.log2().floor() - 2
            return 2.0**power, {"weight_scale": (power + 127).to(torch.uint8)}, 0.0
        if self.format in ("nf4", "fp4"):
            if not self.double:
                return largest, {"weight.absmax": largest.flatten()}, 0.0
            offset, absmax = float(largest.mean()), largest.flatten()
            table = torch.linspace(-1, 1, 256)
            blocks = torch.stack([part.abs().amax() for part in torch.split(absmax - offset, 256)])
            spread = blocks.repeat_interleave(256)[: len(absmax)]
            codes = (((absmax - offset) / spread)[:, None] - table).abs().argmin(-1)
            nested = {"weight.nested_absmax": blocks, "weight.nested_quant_map": table}
            found = (table[codes] * spread + offset).view_as(largest)
            return found, {"weight.absmax": codes.to(torch.uint8), **nested}, offset
        whole = 448.0 * 6.0 / largest.max()
        scales = (largest / 6.0 * whole).to(torch.float8_e4m3fn)
        if self.format == "modelopt":
            factor = {"weight_scale_2": whole.reciprocal(), "input_scale": torch.tensor(0.02)}
        else:
            factor = {"weight_global_scale": whole.view(1), "input_global_scale": torch.tensor([9.0])}
        return scales.float() / whole, {"weight_scale": scales, **factor}, 0.0


def coded_checkpoint(source: Path, target: Path, coded: Coded) -> Path:
    """Write `source` quantized to `target`, and beside it, `target`-plain, what the stored numbers stand for."""
    tensors = load_file(source / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(MATRICES):
            continue
        parts, meant = coded.store(tensor)
        del stored[name]
        stored |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
        plain[name] = meant.to(tensor.dtype)
    for folder, content in ((target, stored), (Path(f"{target}-plain"), plain)):
        shutil.copytree(source, folder)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((target / "config.json").read_text())
    settings["quantization_config"] = coded.config()
    (target / "config.json").write_text(json.dumps(settings))
    return target
