"""What the router costs: requests per CPU-second, added latency, added time to first byte, memory.

Fake engines, load and router share this machine; "added" is through the router less direct, in the same round.

    python bench/router.py --json bench/results/router.json
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import uvloop
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench.http_load import Pool, Sample, closed_loop, open_loop, raw_request
from bench.report import write_report

PATH = "/v1/chat/completions"


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def chat_bodies(count: int, shared_chars: int, own_chars: int, stream: bool) -> list[bytes]:
    """Chat requests whose prompts share one of 20 prefixes."""
    rng = random.Random(0)

    def text(num_chars: int) -> str:
        return "".join(rng.choice("abcdefgh ijklmnop") for _ in range(num_chars))

    prefixes = [text(shared_chars) for _ in range(20)]
    return [
        json.dumps(
            {
                "model": "fake",
                "stream": stream,
                "messages": [{"role": "user", "content": rng.choice(prefixes) + text(own_chars)}],
            }
        ).encode()
        for _ in range(count)
    ]


def start(command: list[str], says: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process and read ports from the line that begins with `says`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(says):
            return process, [int(word) for word in line.split()[1:]]
    raise RuntimeError(f"{command[0]} ended before it was ready")


def wait_ready(port: int, process: subprocess.Popen[bytes], timeout_s: float = 15.0) -> None:
    """Poll /readyz."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError("the router is not ready")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def latencies(samples: list[Sample], of: Callable[[Sample], float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    bad = [s.status for s in samples if s.status != 200]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(samples)} answers were not 200, e.g. {bad[0]}")
    values = [of(s) * 1000 for s in samples]
    return percentile(values, 0.5), percentile(values, 0.99)


def cpu_seconds(pid: int) -> float:
    """User and system time of one process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def one_round(router: int, engine: int, pid: int, seconds: float) -> dict[str, float]:
    """Measure everything once, direct and through the router."""
    figures: dict[str, float] = {}
    host = f"127.0.0.1:{router}"
    through, direct = Pool("127.0.0.1", router), Pool("127.0.0.1", engine)
    for name, shared, own in (("short", 20, 40), ("10 kB", 6000, 4000)):
        requests = [raw_request(host, PATH, body) for body in chat_bodies(400, shared, own, False)]
        before, started = cpu_seconds(pid), time.perf_counter()
        samples = await closed_loop(through, requests, 32, seconds)
        elapsed, used = time.perf_counter() - started, cpu_seconds(pid) - before
        latencies(samples, lambda s: s.total)
        figures[f"{name}, requests/s"] = len(samples) / elapsed
        figures[f"{name}, requests per CPU-second"] = len(samples) / used
    requests = [raw_request(host, PATH, body) for body in chat_bodies(400, 20, 40, False)]
    alone = [latencies(await closed_loop(pool, requests, 1, seconds), lambda s: s.total) for pool in (through, direct)]
    figures["alone, added ms p50"] = alone[0][0] - alone[1][0]
    figures["alone, added ms p99"] = alone[0][1] - alone[1][1]
    streams = [raw_request(host, PATH, body) for body in chat_bodies(400, 20, 40, True)]
    for rate in (200, 500):
        pools = (through, direct)
        first = [latencies(await open_loop(pool, streams, rate, seconds), lambda s: s.first_byte) for pool in pools]
        figures[f"{rate} streams/s, first byte added ms p50"] = first[0][0] - first[1][0]
        figures[f"{rate} streams/s, first byte added ms p99"] = first[0][1] - first[1][1]
    return figures


def resident_mb(pid: int) -> float:
    """Resident memory."""
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def main() -> None:
    """Start the fleet, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="prefix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engines, ports = start([sys.executable, str(HERE / "fake_engine.py")], "ready")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "endpoints.json"
        file.write_bytes(
            encode_endpoints(tuple(Endpoint(f"e{i}", f"http://127.0.0.1:{p}", "fake") for i, p in enumerate(ports)))
        )
        port = free_port()
        router = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("pagefleet-route")),
                "--endpoints-file",
                str(file),
                "--port",
                str(port),
                "--policy",
                arguments.policy,
            ]
        )
        try:
            wait_ready(port, router)
            at_rest = resident_mb(router.pid)
            rounds = [
                uvloop.run(one_round(port, ports[0], router.pid, arguments.seconds)) for _ in range(arguments.rounds)
            ]
            after = resident_mb(router.pid)
        finally:
            router.terminate()
            router.wait(timeout=20)
            engines.kill()
            engines.wait()
    figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    figures |= {"memory at rest, MB": at_rest, "memory after, MB": after}
    for name, value in figures.items():
        print(f"{name:45} {value:12.2f}")
    if arguments.json:
        write_report(arguments.json, "router", {"median": figures, "rounds": rounds, "policy": arguments.policy})


if __name__ == "__main__":
    main()
