"""The kernels one by one: bytes and operations per second as a share of the machine's, and against torch's own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet_engine.bench.plot import plot_lines, require_matplotlib
from pagefleet_engine.bench.report import Report
from pagefleet_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pagefleet_engine.bench.kernel_cases import KernelCase
    from pagefleet_engine.bench.roofline import Roofline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    parser.add_argument("--only", default="", metavar="WORD", help="Kernels whose name contains this word.")
    parser.add_argument("--tune", metavar="FILE", help="Search launch parameters and write the table of this GPU.")
    parser.add_argument("--plot", metavar="FILE", help="Draw the share of the roofline over the sizes as PNG.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="Default: a GPU if any.")


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark. Without a GPU the torch twins run, at sizes that only show that they do."""
    if arguments.plot:
        require_matplotlib()
    from pagefleet_engine.bench.kernel_cases import all_cases  # noqa: PLC0415 torch
    from pagefleet_engine.bench.roofline import measure_roofline  # noqa: PLC0415
    from pagefleet_engine.worker.device import resolve_device  # noqa: PLC0415

    device = resolve_device(arguments.device)
    if arguments.tune and device.type != "cuda":
        raise ConfigError("--tune measures a GPU, and torch finds none here: run it on the machine that will serve")
    cases = [case for case in all_cases(small=device.type != "cuda") if arguments.only in case.family]
    if not cases:
        raise ConfigError(f"no kernel's name contains {arguments.only!r}: leave --only out to see them all")
    roofline = measure_roofline(device)
    figures: dict[str, dict[str, Any]] = {}
    for case in cases:
        figures.setdefault(case.family, {})[case.size] = _measure(case, device, roofline)
    if arguments.plot:
        _plot(figures, Path(arguments.plot))
    what = "Triton kernels" if device.type == "cuda" else "torch twins, small sizes"
    return Report(name="kernels", settings={"measured": what}, figures=figures, roofline=roofline)


def _measure(case: KernelCase, device: torch.device, roofline: Roofline) -> dict[str, float]:
    from pagefleet_engine.bench.kernel_timer import kernel_seconds  # noqa: PLC0415 torch

    prepared = case.prepare(device)
    seconds = kernel_seconds(prepared.ours, device)
    figures = {
        "microseconds": seconds * 1e6,
        "gb_per_s": prepared.num_bytes / seconds / 1e9,
        "tflop_per_s": prepared.flops / seconds / 1e12,
        "share_of_roofline": roofline.seconds(prepared.num_bytes, prepared.flops) / seconds,
    }
    if prepared.peer is not None:
        figures["times_peer_speed"] = kernel_seconds(prepared.peer, device) / seconds
    return figures


def _plot(figures: dict[str, dict[str, Any]], path: Path) -> None:
    lines = {
        family: [(float(index + 1), measured["share_of_roofline"]) for index, measured in enumerate(sizes.values())]
        for family, sizes in figures.items()
    }
    plot_lines(lines, ("pagefleet kernels", "size, in the order of the table", "share of the roofline"), path)
