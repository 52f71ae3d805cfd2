"""What a layer's attention does beyond the plain softmax: which keys a query sees, and what changes their scores."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import LARGEST_FP8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRule:
    """From the product of a query and a key to a weight, for one layer.

    A query at position p sees the keys from `first_visible(p)` to p. The score is `scale * q . k`, then capped, then
    lowered by ALiBi; a sink joins the softmax as one more score without a value. Raises UnsupportedShapeError.
    """

    scale: float
    """Positive; usually head_dim ** -0.5."""
    window: int | None = None
    """Only the last `window` keys are seen, the query's own included."""
    chunk: int | None = None
    """Only keys of the query's own chunk are seen: positions with the same quotient by `chunk`."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks_N: torch.Tensor | None = None
    """float32 [N]."""
    alibi_slopes_N: torch.Tensor | None = None
    """float32 [N]: slope times distance is subtracted from the score (Press et al., arXiv 2108.12409)."""
    k_scale: float = 1.0
    """A key that is stored in float8 times this is the key; of no matter to other pools."""
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UnsupportedShapeError(
                f"a sliding window must hold at least 1 key, not {self.window}; None is no window"
            )
        if self.chunk is not None and self.chunk < 1:
            raise UnsupportedShapeError(f"a chunk must hold at least 1 key, not {self.chunk}; None is no chunks")
        for name in ("scale", "softcap", "k_scale", "v_scale"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and isfinite(value)):
                raise UnsupportedShapeError(f"{name} of attention must be a positive number, not {value}")

    @property
    def local(self) -> bool:
        """Whether a query may see less than everything before it."""
        return self.window is not None or self.chunk is not None

    def visible_span(self, longest: int) -> int:
        """Most keys that one query of a context of `longest` tokens sees."""
        return min(longest, self.window or longest, self.chunk or longest)

    def kv_scales(self, stored: torch.dtype) -> tuple[float, float]:
        """What keys and values of a pool in `stored` are to be multiplied by."""
        return (self.k_scale, self.v_scale) if stored in LARGEST_FP8 else (1.0, 1.0)

    def check_heads(self, num_heads: int, device: torch.device) -> None:
        """Raise UnsupportedShapeError unless sinks and slopes are float32, one per head, on `device`."""
        for name in ("sinks_N", "alibi_slopes_N"):
            values = getattr(self, name)
            if values is None:
                continue
            if values.shape != (num_heads,) or values.dtype != torch.float32 or not values.is_contiguous():
                raise UnsupportedShapeError(
                    f"{name} must be contiguous float32 [{num_heads}], one per query head, "
                    f"not {values.dtype} {list(values.shape)}"
                )
            if values.device != device:
                raise UnsupportedShapeError(f"{name} is on {values.device}, the queries are on {device}")
