"""What the browser console costs a router: `python bench/console_cost.py --engines 100`.

A real router process watches fake engines that have a real engine's metrics, with figures that change at each look.
Told is the processor time of the router's process, the kernel's for it included, in turns: without a console, with one
that nobody looks at, with one page that polls every two seconds as the console does, and with ten of them. No requests
run, so that the difference is the console's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import uvloop
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_protocol.console_state import STATE_PATH, decode_state
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints

from bench.report import write_report

PERIOD_S = 2.0
"""Between two questions of a page."""
WARM_S = 8.0
"""Before measuring: engines become ready, and there are figures to compare with."""


async def serve_fakes(num_engines: int) -> None:
    """Answer probes and metrics on so many ports; prints them."""
    metrics = EngineMetrics("m", lambda: CoreStats(3, 1, 0.4, 1000, 400, 0, 10), max_num_seqs=64)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
                if path == b"/metrics":
                    metrics.generation_tokens.inc(50)
                    metrics.prompt_tokens.inc(400)
                    metrics.time_to_first_token.observe(0.07)
                status = b"404 Not Found" if path.startswith(b"/internal") else b"200 OK"
                body = metrics.render() if path == b"/metrics" else b"{}"
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(num_engines)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def fakes(num_engines: int) -> Iterator[list[str]]:
    """Run the fakes in a process of their own; yields their ports."""
    command = [sys.executable, __file__, "--serve-fakes", str(num_engines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()
        finally:
            process.kill()


@contextlib.contextmanager
def router(folder: Path, ports: Sequence[str], *flags: str) -> Iterator[tuple[psutil.Process, int]]:
    """Run a router before the fakes; yields its process and port."""
    endpoints = tuple(
        Endpoint(f"engine-{number}", f"http://127.0.0.1:{port}", "m") for number, port in enumerate(ports)
    )
    file = folder / "endpoints.json"
    file.write_bytes(encode_endpoints(endpoints))
    command = [sys.executable, "-m", "pagefleet_router.cli", "--endpoints-file", str(file), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "listening on" in line)
            port = int(line.split("listening on http://127.0.0.1:")[1].split(",")[0])
            drain = asyncio.get_running_loop().run_in_executor(None, process.stderr.read)
            yield psutil.Process(process.pid), port
            process.terminate()
            del drain
        finally:
            process.kill()


async def ask(port: int) -> tuple[float, bytes]:
    """Return the seconds that an answer took, and its body."""
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {STATE_PATH} HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return time.monotonic() - started, answer.partition(b"\r\n\r\n")[2]


async def measure(folder: Path, ports: Sequence[str], seconds: float, pages: int | None) -> dict[str, float]:
    """Return the share of a core, in percent, and what answers were like; `pages` None: without a console."""
    waits: list[float] = []
    body = b""
    with router(folder, ports, *(["--no-console"] if pages is None else [])) as (process, port):
        await asyncio.sleep(WARM_S)
        before, started = sum(process.cpu_times()[:2]), time.monotonic()
        while time.monotonic() - started < seconds:
            turn = time.monotonic()
            answers = await asyncio.gather(*(ask(port) for _ in range(pages or 0)))
            waits += [took for took, _ in answers]
            body = answers[0][1] if answers else b""
            await asyncio.sleep(max(0.0, PERIOD_S - (time.monotonic() - turn)))
        share = 100 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
    found = {"percent_of_a_core": round(share, 2)}
    if waits:
        state = decode_state(body)
        assert all(engine.phase == "ready" and engine.ttft is not None for engine in state.engines)
        found |= {"answer_bytes": len(body), "answer_ms_p50": round(1e3 * statistics.median(waits), 2)}
    return found


async def compare(num_engines: int, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Measure all in turns, and return the medians."""
    kinds = {"no_console": None, "nobody_looks": 0, "one_page": 1, "ten_pages": 10}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with fakes(num_engines) as ports, tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for kind, pages in kinds.items():
                found[kind].append(await measure(Path(folder), ports, seconds, pages))
    return {
        kind: {name: round(statistics.median(one[name] for one in those), 2) for name in those[0]}
        for kind, those in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve-fakes", type=int, help="be the engines")
    parser.add_argument("--out", type=Path, default=Path("bench/results/console_cost.json"))
    given = parser.parse_args(arguments)
    if given.serve_fakes:
        uvloop.run(serve_fakes(given.serve_fakes))
    figures = asyncio.run(compare(given.engines, given.seconds, given.rounds))
    for kind, values in figures.items():
        print(kind, *(f"{name}={value}" for name, value in values.items()))
    write_report(given.out, "console_cost", {"engines": given.engines, "period_s": PERIOD_S, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
