"""Fresh processes, from their start to the first token, and where the time goes: of an engine alone, or of a server."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

from pagefleet_protocol.metric_names import ENGINE_STARTUP_SECONDS

from pagefleet_engine.bench.engine_options import add_engine_arguments, engine_settings, model_folder
from pagefleet_engine.bench.percentiles import percentile
from pagefleet_engine.bench.report import Report
from pagefleet_engine.bench.server_process import SERVE_COMMAND, flag, started_server
from pagefleet_engine.errors import ConfigError

_CHILD = "pagefleet_engine.bench.start_once"
_PHASE = re.compile(ENGINE_STARTUP_SECONDS + r'{.*phase="(\w+)"} (\S+)')
_PROMPT = list(range(16))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    parser.add_argument("--repeats", type=int, default=3, help="Processes, one after the other. Default: 3.")
    parser.add_argument(
        "--server", action="store_true", help="Start `pagefleet serve`, whose two processes load side by side."
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds that one may take. Default: 600.")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark. The first process is reported apart: it may find caches cold."""
    from pagefleet_engine.bench.roofline import measure_roofline  # noqa: PLC0415 torch
    from pagefleet_engine.worker.device import resolve_device  # noqa: PLC0415

    with model_folder(arguments) as (model, options):
        start = _serve if arguments.server else _start
        starts = [start(model, options, arguments.timeout) for _ in range(arguments.repeats)]
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
    settings = {"repeats": arguments.repeats, "server": arguments.server, **options}
    settings |= {"model": arguments.shape or "a folder"}
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


def _serve(model: str, options: dict[str, Any], timeout: float) -> dict[str, Any]:
    """As `_start`, of a server: its own phases are from its process's start, those of its core from when it is told
    what to load, and they run side by side."""
    with tempfile.TemporaryFile() as log:
        command = [*SERVE_COMMAND, model, *map(flag, options, options.values())]
        began = time.monotonic()
        try:
            with started_server(command, log, timeout) as port:
                ready_s = time.monotonic() - began
                with closing(HTTPConnection("127.0.0.1", port, timeout)) as http:
                    first_token_s = _first_token(http)
                    http.request("GET", "/metrics")
                    told = _PHASE.findall(http.getresponse().read().decode())
        except ConfigError:
            log.seek(0)
            print(log.read().decode(errors="replace"), file=sys.stderr, end="")
            raise
        log.seek(0)
        said = log.read().decode(errors="replace")
    phases = {name: float(seconds) for name, seconds in told}
    return {"phases": phases, "seconds": ready_s + first_token_s, "first_token_s": first_token_s, "log": said}


def _first_token(http: HTTPConnection) -> float:
    """Seconds from asking a server to its first token."""
    http.request("GET", "/v1/models")
    name = json.loads(http.getresponse().read())["data"][0]["id"]
    asked = {"model": name, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    began = time.monotonic()
    http.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    reply = http.getresponse()
    reply.readline()
    seconds = time.monotonic() - began
    reply.read()
    return seconds
