"""Conversations with a prefix cache and without: two servers of one small model, side by side, as a picture.

The picture of docs/benchmarking.md is made by `make bench-picture`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine.bench.cli import main as bench
from pagefleet_engine.bench.server_process import SERVE_COMMAND, started_server

from bench.report import ROOT

MODEL = ("builtin://tiny", "--num-threads=1")
SERVERS = {"cached": "--enable-prefix-caching", "not-cached": "--no-enable-prefix-caching"}
LOAD = (
    *("--multi-turn", "--num-turns=4", "--num-prompts=6", "--max-concurrency=1,2,4", "--num-warmups=2"),
    *("--conversation-prefix-len=800", "--input-len=60", "--output-len=16", "--vocab-size=400"),
)
PICTURE = os.path.relpath(ROOT / "docs" / "images" / "bench-conversations.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE", default=PICTURE)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        urls = [
            f"{name}=http://127.0.0.1:{stack.enter_context(started_server([*SERVE_COMMAND, *MODEL, flag]))}"
            for name, flag in SERVERS.items()
        ]
        report = [f"--json={given.json}"] if given.json else []
        return bench(["serve", "--base-url", *urls, *LOAD, f"--rounds={given.rounds}", f"--plot={given.plot}", *report])


if __name__ == "__main__":
    sys.exit(main())
