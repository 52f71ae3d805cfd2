"""Writes what was measured of disaggregation into docs/disaggregation.md and bench/results/README.md, as tables.

Each table stands between two comments with its name; all else in the files stays as it is.

python bench/disaggregation_tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
WORSE = 1.1
"""A figure counts as worse from this ratio on: less is within what the machine moves."""
COLUMNS = (
    ("ttft_p50_ms", "TTFT p50, ms"),
    ("ttft_p90_ms", "p90"),
    ("itl_p50_ms", "ITL p50, ms"),
    ("itl_p99_ms", "p99"),
    ("goodput_requests_per_s", "goodput, 1/s"),
)
PICTURE = "![Both fleets over the load, by length of prompts](disaggregation.svg)"
SENT = {
    "put_async": "`put_async`: while the next chunk is computed",
    "put": "`put`: at the end",
    "get": "`get`: when fetched, at the end",
}
RANKS = {
    "1_to_1": "from one rank to one",
    "2_to_1": "from two ranks to one",
    "1_to_2": "from one rank to two",
}


def transfer_table(figures: Mapping[str, Any], ways: Mapping[str, str] = SENT) -> str:
    """Return the medians of `disaggregation.json`, or of the same over ranks, a row for each way."""
    lines = [
        "| blocks are sent | first token, s | of one engine, s | exposed, share of the first | MB | answers equal |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, label in ways.items():
        found = figures[name]
        equal = f"{found['equal_answers']:.0f} of {len(found['ttft_s'])}"
        lines.append(
            f"| {label} | {found['median_ttft_s']:.2f} | {found['median_whole_ttft_s']:.2f}"
            f" | {found['median_exposed_s'] * 1e3:.0f} ms, {100 * found['median_exposed_share']:.1f} %"
            f" | {found['median_received_mb']:.0f} | {equal} |"
        )
    return "\n".join(lines)


def sweep_table(by_length: Mapping[str, Any]) -> str:
    """Return `disaggregation_sweep.json`, a row for each prompt length and load; bold is where the pair is worse."""
    titles = " | ".join(title for _, title in COLUMNS)
    lines = [
        f"| prompt | load: requests/s | {titles} | prompts passed on | answers equal |",
        f"|---:|---:|{'---:|' * len(COLUMNS)}---:|---:|",
    ]
    for length, load, cell in _cells(by_length):
        shown = " | ".join(_both(cell, name) for name, _ in COLUMNS)
        passed = f"{cell['pair']['choices'].get('remote', 0):.0f} of {cell['requests']}"
        equal = f"{cell['equal_answers']} of {cell['requests']}"
        lines.append(f"| {length} | {load}: {cell['offered_requests_per_s']:.1f} | {shown} | {passed} | {equal} |")
    return "\n".join([*lines, "", verdict(by_length)])


def verdict(by_length: Mapping[str, Any]) -> str:
    """Return one sentence for each figure in which the pair loses somewhere."""
    sentences = []
    for name, what in (
        ("goodput_requests_per_s", "goodput"),
        ("ttft_p90_ms", "TTFT p90"),
        ("itl_p99_ms", "ITL p99"),
    ):
        lost = [f"{length} at {load}" for length, load, cell in _cells(by_length) if is_worse(cell, name)]
        count = len(list(_cells(by_length)))
        where = f" (tokens at load: {', '.join(lost)})" if lost else ""
        sentences.append(f"In {what} the pair loses in {len(lost)} of {count} cases{where}.")
    return "\n".join(sentences)


def is_worse(cell: Mapping[str, Any], name: str) -> bool:
    """Whether the pair is behind the two engines for whole requests by more than the machine moves."""
    whole, pair = cell["colocated"][name], cell["pair"][name]
    return bool(whole > WORSE * pair if name.startswith("goodput") else pair > WORSE * whole)


def _cells(by_length: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for length, found in by_length.items():
        for load, cell in found["by_load"].items():
            yield f"{int(length):,}", load, cell


def _both(cell: Mapping[str, Any], name: str) -> str:
    whole, pair = (f"{cell[fleet][name]:.3g}" if cell[fleet][name] < 100 else f"{cell[fleet][name]:,.0f}"
                   for fleet in ("colocated", "pair"))  # fmt: skip
    return f"{whole} / **{pair}**" if is_worse(cell, name) else f"{whole} / {pair}"


def fill(text: str, name: str, table: str) -> str:
    """Put a table between the comments of its name.

    Raises:
        ValueError: the text has no such comments, or more than one pair of them.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    found = re.findall(f"{begin}.*?{end}", text, flags=re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"there have to be one {begin!r} and one {end!r} after it, not {len(found)}")
    return text.replace(found[0], f"{begin}\n{table}\n{end}")


def write(path: Path, tables: Sequence[tuple[str, str]]) -> None:
    """Fill all tables of one file."""
    text = path.read_text()
    for name, table in tables:
        text = fill(text, name, table)
    path.write_text(text)


def main() -> None:
    """Fill the files from the results."""
    transfer = json.loads((RESULTS / "disaggregation.json").read_text())["figures"]
    sweep = json.loads((RESULTS / "disaggregation_sweep.json").read_text())["figures"]["by_length"]
    ranks = json.loads((RESULTS / "disaggregation_ranks.json").read_text())["figures"]
    figures = ("transfer figures", transfer_table(transfer))
    over_ranks = ("rank figures", transfer_table(ranks, RANKS))
    write(
        ROOT / "docs" / "disaggregation.md",
        [figures, over_ranks, ("sweep figures", f"{sweep_table(sweep)}\n\n{PICTURE}")],
    )
    write(RESULTS / "README.md", [figures, ("sweep verdict", verdict(sweep))])


if __name__ == "__main__":
    main()
