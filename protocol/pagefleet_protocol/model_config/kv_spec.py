"""What a layer keeps of each token: the arithmetic of KV caches, for engine, operator and benchmarks alike.

How long it keeps it (all of the context, or a window) is up to the layer; all layers of a model keep the same sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Of one layer and token. Counts are of at least 1."""

    vectors: int
    """Of each head: 2, a key and a value; 1, a latent that both are made from."""
    heads: int
    dim: int
    """Numbers in a vector."""

    @classmethod
    def pairs(cls, heads: int, dim: int) -> KVSpec:
        """A key and a value for each head."""
        return cls(2, heads, dim)

    @classmethod
    def latent(cls, rank: int, rope_dim: int) -> KVSpec:
        """One vector for all heads (MLA, arXiv 2405.04434): the latent, and behind it the key's rotated part."""
        return cls(1, 1, rank + rope_dim)

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are made from one vector."""
        return self.vectors == 1

    @property
    def numbers(self) -> int:
        """How many numbers a token takes in a layer."""
        return self.vectors * self.heads * self.dim

    def of_rank(self, ranks: int) -> KVSpec:
        """What one of so many tensor ranks has: where heads are fewer than ranks, several have the same."""
        return KVSpec(self.vectors, math.ceil(self.heads / ranks), self.dim)
