"""Fresh processes, from their start to the first token, and where the time goes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from pagefleet_engine.bench.engine_options import add_engine_arguments, engine_settings, model_folder
from pagefleet_engine.bench.percentiles import percentile
from pagefleet_engine.bench.report import Report
from pagefleet_engine.errors import ConfigError

_CHILD = "pagefleet_engine.bench.start_once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    parser.add_argument("--repeats", type=int, default=3, help="Processes, one after the other. Default: 3.")
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds that one may take. Default: 600.")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark. The first process is reported apart: it may find caches cold."""
    from pagefleet_engine.bench.roofline import measure_roofline  # noqa: PLC0415 torch
    from pagefleet_engine.worker.device import resolve_device  # noqa: PLC0415

    with model_folder(arguments) as (model, options):
        starts = [_start(model, options, arguments.timeout) for _ in range(arguments.repeats)]
    warm = starts[1:] or starts
    phases = {name for start in warm for name in start["phases"]}
    print(starts[-1]["log"], file=sys.stderr, end="")
    figures = {
        "first_process_seconds": starts[0]["seconds"],
        "seconds": {
            "p50": percentile([start["seconds"] for start in warm], 50),
            "max": max(start["seconds"] for start in warm),
        },
        "phase_seconds": {
            name: percentile([start["phases"].get(name, 0.0) for start in warm], 50) for name in sorted(phases)
        },
        "first_token_ms": percentile([start["first_token_s"] for start in warm], 50) * 1e3,
    }
    settings = {"repeats": arguments.repeats, **options, "model": arguments.shape or "a folder"}
    roofline = measure_roofline(resolve_device(engine_settings(arguments).get("device", "auto")))
    return Report(name="startup", settings=settings, figures=figures, roofline=roofline)


def _start(model: str, options: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run one process to its first token; `seconds` counts from before it was started, and is the sum of the phases
    and the first token. `process` is the phase in which the interpreter starts."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD],
            input=json.dumps({"model": model, "options": options}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the engine gave no token within {timeout:.0f} s: give a longer --timeout") from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ConfigError(f"the engine did not start: {reason[0][:300]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    phases = answer["phases"] | {"process": answer["began_at"] - began}
    return {**answer, "phases": phases, "seconds": answer["first_token_at"] - began, "log": done.stderr}
