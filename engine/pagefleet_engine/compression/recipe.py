"""What is asked for, and how compressed-tensors spells it in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.compression.grid import Grid
from pagefleet_engine.compression.settings import ActOrder, Algorithm, KVCacheScheme, Scheme
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.layers.quantization_scheme import Quantization
from pagefleet_engine.models.quantization_config import read_quantization

FP8_BLOCK = 128
_FORMATS = {"fp8": "float-quantized", "fp8-block": "float-quantized", "int8": "int-quantized"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How every matrix is quantized, but those that are ignored."""

    scheme: Scheme
    algorithm: Algorithm
    group_size: int | None = None
    """Inputs of a row that share a scale, in W4A16 and W8A16; None: all."""
    actorder: ActOrder = "none"
    """Of GPTQ: the order in which inputs are rounded. weight: the largest first, in groups of neighbours (compressed-
    tensors has given up groups of that order)."""
    dampening_frac: float = 0.01
    """Of GPTQ: share of the mean of the Hessian's diagonal that is added to it."""
    ignore: tuple[str, ...] = ()
    """Layers that stay as they are besides the head: names, parts of names, or `re:` and an expression."""
    kv_cache_scheme: KVCacheScheme = "none"
    """What scales of keys and values are for."""

    @property
    def is_calibrated(self) -> bool:
        """Text has to go through the model."""
        return self.algorithm != "rtn" or self.kv_cache_scheme != "none"

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Of keys and values as they are to be served; None: the model's."""
        return torch.float8_e4m3fn if self.kv_cache_scheme == "fp8" else None

    @property
    def is_packed(self) -> bool:
        """Weights alone are quantized, and lie in words of 32 bits."""
        return self.scheme not in _FORMATS

    @property
    def bits(self) -> int:
        """Of a number."""
        return 4 if self.scheme.startswith("w4") else 8

    @property
    def is_symmetric(self) -> bool:
        """Zero points are the middle of all numbers."""
        return self.scheme != "w4a16-asym"

    def grid(self, dtype: torch.dtype) -> Grid:
        """The numbers; scales are stored in `dtype`, the model's."""
        return Grid(
            "fp8" if self.scheme.startswith("fp8") else "int", self.bits, self.is_symmetric, self.is_packed, dtype
        )

    def check(self) -> None:
        """Raises ConfigError for what does not go together."""
        if self.algorithm != "rtn" and self.scheme.startswith("fp8"):
            raise ConfigError(
                f"--algorithm {self.algorithm} is for whole numbers, and --scheme is {self.scheme}: give rtn"
            )
        if self.algorithm == "awq" and not self.is_packed:
            raise ConfigError(f"--algorithm awq is for weights alone, and --scheme is {self.scheme}: give gptq or rtn")

    def section(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` for config.json."""
        form = _FORMATS.get(self.scheme, "pack-quantized")
        group = {
            "targets": ["Linear"],
            "weights": self._weights(),
            "input_activations": self._inputs(),
            "output_activations": None,
            "format": form,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": _numbers("float") | {"strategy": "tensor"} if self.kv_dtype else None,
            "ignore": list(ignored),
            "config_groups": {"group_0": group},
        }

    def quantization(self, ignored: Sequence[str]) -> Quantization:
        """The same as the engine reads it, so that what is written is what is served.

        Raises:
            ModelLoadError: a pattern among those that are ignored is no regular expression.
        """
        fields = ConfigFields({"quantization_config": self.section(ignored)}, "--ignore")
        found = read_quantization(fields)
        assert found is not None, "the section is there"
        return found

    def _weights(self) -> dict[str, Any]:
        args = _numbers("float" if self.scheme.startswith("fp8") else "int", self.bits, self.is_symmetric)
        if self.scheme == "fp8-block":
            return args | {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
        if self.group_size is None:
            return args | {"strategy": "channel"}
        order = None if self.actorder == "none" else self.actorder
        return args | {"strategy": "group", "group_size": self.group_size, "actorder": order}

    def _inputs(self) -> dict[str, Any] | None:
        match self.scheme:
            case "fp8":
                return _numbers("float") | {"strategy": "token", "dynamic": True, "observer": None}
            case "fp8-block":
                return _numbers("float") | {
                    "strategy": "group", "group_size": FP8_BLOCK, "dynamic": True, "observer": None
                }  # fmt: skip
            case "int8":
                return _numbers("int") | {"strategy": "token", "dynamic": True, "observer": None}
            case _:
                return None


def _numbers(kind: str, bits: int = 8, symmetric: bool = True) -> dict[str, Any]:
    return {
        "type": kind,
        "num_bits": bits,
        "symmetric": symmetric,
        "strategy": "channel",
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
