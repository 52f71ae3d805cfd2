"""What a layer does to its projected heads before it attends, apart from the rotation of the step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagefleet_engine.attention.backend import AttentionSpec
from pagefleet_engine.layers.norm import HeadNorm


@dataclass(slots=True, eq=False)
class Heads:
    """One layer's heads, how they are normalised, and how they attend."""

    num_heads: int
    num_kv_heads: int
    norm: HeadNorm | None
    spec: AttentionSpec

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """Take the scales of a KV cache in 8 bits, which arrive with the weights."""
        self.spec = replace(self.spec, k_scale=k_scale, v_scale=v_scale)
