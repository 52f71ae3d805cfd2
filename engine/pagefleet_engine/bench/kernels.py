"""The kernels one by one: bytes and operations per second as a share of the machine's, and against torch's own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet_engine.bench.plot import plot_bars, require_matplotlib
from pagefleet_engine.bench.report import Report
from pagefleet_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pagefleet_engine.bench.kernel_cases import KernelCase
    from pagefleet_engine.bench.kernel_tuning import TunedDevice
    from pagefleet_engine.bench.roofline import Roofline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    parser.add_argument("--only", default="", metavar="WORD", help="Kernels whose name contains this word.")
    parser.add_argument(
        "--tune", metavar="FILE", help="Search this GPU's launch parameters instead; start from FILE if it exists."
    )
    parser.add_argument("--plot", metavar="FILE", help="Draw the shares of the roofline, ours and torch's, as PNG.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="Default: a GPU if any.")


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark. Without a GPU the torch twins run, at sizes that only show that they do."""
    if arguments.plot:
        require_matplotlib()
    from pagefleet_engine.bench.kernel_cases import all_cases  # noqa: PLC0415 torch
    from pagefleet_engine.bench.roofline import device_errors, measure_roofline  # noqa: PLC0415
    from pagefleet_engine.worker.device import resolve_device  # noqa: PLC0415

    device = resolve_device(arguments.device)
    if arguments.tune and device.type != "cuda":
        raise ConfigError("--tune measures a GPU, and torch finds none here: run it on the machine that will serve")
    if arguments.tune:
        return _tune(Path(arguments.tune), arguments.only, device)
    cases = [case for case in all_cases(small=device.type != "cuda") if arguments.only in case.family]
    _require_some(cases, arguments.only)
    roofline = measure_roofline(device)
    figures: dict[str, dict[str, Any]] = {}
    for case in cases:
        sizes = figures.setdefault(case.family, {})
        try:
            sizes[case.size] = _measure(case, device, roofline)
        except device_errors(device) as error:  # what one size shows must not hide the others
            sizes[case.size] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    if arguments.plot:
        _plot(figures, Path(arguments.plot))
    what = "Triton kernels" if device.type == "cuda" else "torch twins, small sizes"
    return Report(name="kernels", settings={"measured": what}, figures=figures, roofline=roofline)


def _require_some(found: Sequence[object], word: str) -> None:
    if not found:
        raise ConfigError(f"no kernel's name contains {word!r}: leave --only out to see them all")


def _tune(path: Path, word: str, device: torch.device) -> Report:
    """The table is written after each step, so that a search that is stopped can be continued."""
    from pagefleet_kernels.dispatch import architecture  # noqa: PLC0415 torch
    from pagefleet_kernels.errors import LaunchTableError  # noqa: PLC0415
    from pagefleet_kernels.tuning import LaunchTable, launch_table, read_table, table_to_json  # noqa: PLC0415

    from pagefleet_engine.bench.kernel_tuning import TuningSizes, run_steps, tuning_steps  # noqa: PLC0415
    from pagefleet_engine.bench.roofline import measure_roofline  # noqa: PLC0415

    name = architecture(device)
    try:
        table = read_table(path) if path.exists() else launch_table(name)
    except LaunchTableError as error:
        raise ConfigError(f"{error}: name another file for --tune") from None
    if path.exists() and table.architecture != name:
        raise ConfigError(f"{path} holds the table of {table.architecture}, this GPU is {name}: name another file")
    steps = [step for step in tuning_steps(_tuned_device(device, name), TuningSizes()) if word in step.name]
    _require_some(steps, word)
    path.parent.mkdir(parents=True, exist_ok=True)

    def found(step: str, table: LaunchTable, figures: dict[str, Any]) -> None:
        path.write_text(table_to_json(table), encoding="utf-8")
        times = f"{figures['before_microseconds']:,.1f} -> {figures['best_microseconds']:,.1f} us"
        print(f"{step}: {times} of {figures['candidates']} candidates", flush=True)

    table, figures = run_steps(table, steps, found)
    print(f"the table is in {path.name}: serve with PAGEFLEET_LAUNCH_TABLE, or ship it as tables/{name}.json")
    return Report(name="kernels --tune", figures=figures, roofline=measure_roofline(device))


def _tuned_device(device: torch.device, name: str) -> TunedDevice:
    import torch  # noqa: PLC0415
    from triton.compiler.errors import CompilationError  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415
    from triton.runtime.errors import OutOfResources  # noqa: PLC0415

    from pagefleet_engine.bench.kernel_tuning import TunedDevice  # noqa: PLC0415
    from pagefleet_engine.bench.roofline import kernel_seconds  # noqa: PLC0415 torch

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    return TunedDevice(
        device=device,
        architecture=name,
        shared_bytes=properties["max_shared_mem"],
        num_processors=properties["multiprocessor_count"],
        free_bytes=torch.cuda.mem_get_info(device)[0],
        clock=lambda run: kernel_seconds(run, device) * 1e3,
        does_not_fit=(OutOfResources, CompilationError),
    )


def _measure(case: KernelCase, device: torch.device, roofline: Roofline) -> dict[str, float]:
    from pagefleet_engine.bench.roofline import kernel_seconds  # noqa: PLC0415 torch

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
    panels = {
        family: {size: _shares(measured) for size, measured in sizes.items() if "failed" not in measured}
        for family, sizes in figures.items()
    }
    panels = {family: sizes for family, sizes in panels.items() if sizes}
    if not panels:
        raise ConfigError("nothing could be measured, so there is nothing to draw: leave --plot out to see why")
    plot_bars(panels, ("pagefleet bench kernels", "share of the roofline"), path)


def _shares(measured: dict[str, float]) -> dict[str, float]:
    ours = measured["share_of_roofline"]
    peer = {"torch": ours / measured["times_peer_speed"]} if "times_peer_speed" in measured else {}
    return {"pagefleet": ours, **peer}
