"""From `pagefleet up` in an installed environment to the first answer of `builtin://tiny`, through the router.

python bench/first_answer.py --json bench/results/first_answer.json
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench.report import write_report

SERVICE = HERE.parent / "examples" / "01-quickstart" / "inferenceservice.yaml"
QUESTION = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": "What is a KV cache?"}]}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int) -> str | None:
    """The answer, or None while there is none."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(QUESTION).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def seconds_to_first_answer(timeout_s: float = 120.0) -> float:
    """Start a fleet, ask until it answers, stop it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as state:
        pagefleet = str(Path(sys.executable).with_name("pagefleet"))
        command = [pagefleet, "up", str(SERVICE), "--port", str(port), "--state-dir", state]
        started = time.perf_counter()
        fleet = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while ask(port) is None:
                if fleet.poll() is not None or time.perf_counter() - started > timeout_s:
                    raise RuntimeError("the fleet did not answer")
                time.sleep(0.02)
            return time.perf_counter() - started
        finally:
            fleet.send_signal(signal.SIGINT)
            fleet.wait(timeout=60)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = [seconds_to_first_answer() for _ in range(arguments.runs)]
    print(f"first answer after {statistics.median(runs):.2f} s (from {min(runs):.2f} to {max(runs):.2f})")
    if arguments.json:
        write_report(arguments.json, "first answer", {"seconds": runs, "median seconds": statistics.median(runs)})


if __name__ == "__main__":
    main()
