"""What was done to a model, and what it cost."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from pagefleet_engine.compression.recipe import Recipe


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """One matrix."""

    name: str
    weight_error: float
    """Norm of what rounding changed, over the weights' own."""
    output_error: float | None
    """The same of its products with the calibration's inputs; None: there were none."""
    tokens: int
    """Of calibration that it saw."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The model on text that it was not calibrated with."""

    tokens: int
    before: float
    """Mean negative log-likelihood of a token."""
    after: float
    text: str
    """Where it comes from, in words."""
    vocab_size: int

    @property
    def means_something(self) -> bool:
        """Whether the model knows such text at all: better than one that finds every token as likely as another."""
        return self.before < math.log(self.vocab_size)

    def describe(self) -> str:
        """A line of the report."""
        if not self.means_something:
            return (
                f"perplexity: none, as the model does not know {self.text}, which it guesses worse than by chance: "
                "give --calibration FILE with text like that which it will see"
            )
        perplexities = f"{math.exp(self.before):.3f} before, {math.exp(self.after):.3f} after"
        return f"perplexity of {self.tokens} held-out tokens of {self.text}: {perplexities}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; perplexities are null where they mean nothing."""
        known = self.means_something
        before, after = (math.exp(found) if known else None for found in (self.before, self.after))
        return {"text": self.text, "tokens": self.tokens, "before": before, "after": after}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of a run."""

    model: str
    recipe: Recipe
    calibration_tokens: int
    matrices: tuple[MatrixReport, ...]
    held_out: Tried
    bytes_before: int
    bytes_after: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values, with perplexities."""
        return {**asdict(self), "held_out": None} | {"perplexity": self.held_out.as_json()}

    def table(self) -> str:
        """Errors by kind of matrix, sizes and perplexities, a line each."""
        lines = [f"{'matrix':<28} {'count':>6} {'weights':>9} {'outputs':>9}"]
        for kind, found in self._by_kind().items():
            weights = sum(one.weight_error for one in found) / len(found)
            known = [one.output_error for one in found if one.output_error is not None]
            outputs = f"{sum(known) / len(known):9.4f}" if known else f"{'-':>9}"
            lines.append(f"{kind:<28} {len(found):>6} {weights:9.4f} {outputs}")
        return "\n".join(
            [
                *lines,
                f"size: {self.bytes_before / 1e6:.1f} MB before, {self.bytes_after / 1e6:.1f} MB after",
                self.held_out.describe(),
                f"{self.calibration_tokens} tokens of calibration, {self.seconds:.1f} s",
            ]
        )

    def _by_kind(self) -> dict[str, list[MatrixReport]]:
        kinds = defaultdict(list)
        for matrix in self.matrices:
            kinds[".".join("*" if part.isdecimal() else part for part in matrix.name.split(".")[-3:])].append(matrix)
        return kinds
