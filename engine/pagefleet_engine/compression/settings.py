"""What `pagefleet quantize` can be told. Imports no torch, for which --help must not wait."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pagefleet_protocol.settings.fields import Between, Count, Share, Spellings

from pagefleet_engine.config import DType

Scheme = Literal["fp8", "fp8-block", "int8", "w4a16", "w4a16-asym", "w8a16"]
Algorithm = Literal["rtn", "gptq", "awq"]
ActOrder = Literal["none", "weight"]
KVCacheScheme = Literal["none", "fp8"]

_SCHEMES = {
    "FP8_DYNAMIC": "fp8",
    "FP8_BLOCK": "fp8-block",
    "W8A8": "int8",
    "W4A16": "w4a16",
    "W4A16_ASYM": "w4a16-asym",
    "W8A16": "w8a16",
}
"""llm-compressor's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """What `pagefleet quantize` can be told."""

    model: str
    """A folder, a name on the hub, or builtin://tiny; in a float type."""
    output: Path
    """The new folder."""
    scheme: Annotated[Literal["fp8", "fp8-block", "int8", "w4a16", "w4a16-asym", "w8a16"], Spellings(_SCHEMES)] = (
        "w4a16"
    )
    """fp8 and int8: weights per channel and inputs per token; fp8-block: blocks of 128; w4a16, w4a16-asym (with zero
    points), w8a16: weights alone."""
    algorithm: Literal["auto", "rtn", "gptq", "awq"] = "auto"
    """rtn: round to nearest, without calibration. auto: gptq, and rtn for fp8."""
    group_size: Annotated[int, Between(-1)] = 128
    """Inputs of a row that share a scale, in w4a16 and w8a16; -1: all."""
    actorder: ActOrder = "weight"
    """Order in which gptq rounds inputs. weight: the largest first; groups stay those of neighbours."""
    dampening_frac: Share = 0.01
    """Of gptq: share of the mean of the Hessian's diagonal that is added to it."""
    kv_cache_scheme: KVCacheScheme = "none"
    """fp8: write scales for keys and values too, which count where they are served with --kv-cache-dtype fp8."""
    calibration: Path | None = None
    """Text like that which the model will see: a file of lines, or .jsonl of objects with `text` or `messages`.
    Default: the description of Python's language."""
    num_calibration_samples: Count = 128
    """Texts to calibrate with, at most."""
    max_seq_length: Annotated[int, Between(2)] = 512
    """Tokens of a text that are taken."""
    ignore: tuple[str, ...] = ()
    """Layers that stay as they are, besides the head: a name, part of one, or re: and a regular expression."""
    dtype: DType = "auto"
    """Type that layers are computed in. auto: bfloat16 where the processor multiplies it, else float32."""
    revision: str | None = None
    """Branch, tag or commit of a model of the hub."""
    download_dir: str | None = None
    """Where models of the hub are kept."""
