"""The figures of several processes as those of one.

Works on Prometheus text as the processes write it (their library's own output), line by line: a scrape must not keep
the event loop, and a parser that understands everything takes twenty times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

Rule = Literal["sum", "own", "largest", "mean"]
"""Of a family: how its values become one. `own` is the word of the process that answers; `mean` is over those that say
something."""


def add_up(family: str) -> Rule:
    """Return the rule of processes that count for themselves alone."""
    return "own" if family.endswith("_info") else "sum"


class Exposition:
    """A text taken apart: family heads with their samples, in order.

    Raises:
        ValueError: the text is no exposition.
    """

    def __init__(self, text: bytes) -> None:
        self.heads: dict[str, list[str]] = {}
        """HELP and TYPE lines by family."""
        self.samples: dict[str, dict[str, float]] = {}
        """Values by name with labels, by family."""
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                self.heads.setdefault(family, []).append(line)
                self.samples.setdefault(family, {})
            elif line:
                name, _, value = line.rpartition(" ")
                if not family or not name:
                    raise ValueError("a sample without a family or a value")
                self.samples[family][name] = float(value)


def merge(own: bytes, others: Iterable[bytes], rule_of: Callable[[str], Rule] = add_up) -> bytes:
    """Return one exposition for all processes.

    Args:
        own: of the process that answers.
        others: of the other ones. One that cannot be read is left out.
        rule_of: returns the rule of a family.
    """
    parts = [Exposition(own)]
    for text in others:
        try:
            parts.append(Exposition(text))
        except ValueError:
            continue
    heads: dict[str, list[str]] = {}
    for part in parts:
        for family, lines in part.heads.items():
            heads.setdefault(family, lines)
    written = []
    for family, lines in heads.items():
        written += lines
        merged = _merge_family(rule_of(family), [part.samples.get(family, {}) for part in parts])
        written += [f"{name} {_shown(value)}" for name, value in merged.items()]
    return ("\n".join(written) + "\n").encode()


def _merge_family(rule: Rule, parts: Sequence[dict[str, float]]) -> dict[str, float]:
    if rule == "own":
        return parts[0]
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    if rule == "largest":
        return {name: max(found) for name, found in values.items()}
    totals = {name: sum(found) for name, found in values.items()}
    return totals if rule == "sum" else {name: total / len(values[name]) for name, total in totals.items()}


def _shown(value: float) -> str:
    return repr(value).replace("inf", "Inf").replace("nan", "NaN")
