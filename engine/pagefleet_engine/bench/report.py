"""What a benchmark leaves: figures beside the limits of the machine that had them, and all that is needed to repeat."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet_engine.bench.machine import describe_commit, describe_machine

if TYPE_CHECKING:
    from pagefleet_engine.bench.roofline import Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. Keys of `figures` carry their units."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any]
    command: Sequence[str] = ()
    """What was typed; filled in by the program."""
    roofline: Roofline | None = None
    """Measured in the same run."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "machine": describe_machine(),
            "commit": describe_commit(Path(__file__).parent),
            "command": shlex.join(self.command),
            "settings": dict(self.settings),
            "roofline": None if self.roofline is None else asdict(self.roofline),
            "figures": dict(self.figures),
        }

    def write(self, path: str | Path) -> None:
        """As JSON; makes the folder."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def table(self) -> str:
        """For a terminal: a line for each figure, the machine's limits last."""
        rows = [(name.replace("_", " "), _shown(value)) for name, value in _flat("", self.figures)]
        if self.roofline is not None:
            rows.append(("measured copy bandwidth", f"{self.roofline.copy_bytes_per_s / 1e9:,.0f} GB/s"))
            rows.append(("measured bf16 product", f"{self.roofline.matmul_flops_per_s / 1e12:,.2f} TFLOP/s"))
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([f"{self.name}", *(f"  {name:<{width}}  {value:>14}" for name, value in rows)])


def _flat(prefix: str, figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found += _flat(f"{prefix}{name} ", value)
        else:
            found.append((prefix + name, value))
    return found


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
