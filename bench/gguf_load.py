"""Loading a GGUF file on a CPU against reading it, in turns; the file is in the page cache throughout.

python bench/gguf_load.py --json bench/results/gguf_load.json

The file has the shape of a Llama of 1.2 billion weights, in random blocks: about 1 GB in Q8_0. It is read into new
memory, as a program needs that wants to use it, by as many threads as load; and by one through a buffer, and forgotten.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine.gguf.blocks import BY_NAME
from pagefleet_engine.gguf.folder import folder_of
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from pagefleet_kernels.native.library import load_library

from bench.llama_cpp import write_model
from bench.report import write_report

KINDS = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")
_PIECE = 16 << 20


def random_blocks(kind: str, shape: tuple[int, int]) -> np.ndarray:
    """A matrix of random numbers, whose scales are of a size that weights have."""
    blocks, rng = BY_NAME[kind], np.random.default_rng(0)
    found = rng.integers(0, 256, (shape[0], shape[1] // blocks.numbers, blocks.num_bytes), np.uint8)
    for start in {"Q6_K": (208,), "Q5_K": (0, 2), "Q4_K": (0, 2)}.get(kind, (0,)):
        found[..., start : start + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    return found.reshape(shape[0], -1)


def read_all(path: Path, threads: int) -> None:
    """All of a file, into new memory."""
    size = path.stat().st_size
    memory = np.empty(size, np.uint8).data
    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:

        def read(start: int) -> None:
            view = memory[start : start + _PIECE]
            while view:
                count = os.preadv(file.fileno(), [view], start)
                view, start = view[count:], start + count

        list(pool.map(read, range(0, size, _PIECE)))


def read_through(path: Path) -> None:
    """All of a file, into a buffer that is used again."""
    buffer = bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def load(folder: Path) -> None:
    """The model's weights, as an engine has them."""
    place = Placement(torch.bfloat16, torch.device("cpu"), use_kernels=False, native=load_library()[0])
    load_model(folder, read_arch(folder), place, "auto", 0)


def seconds(run: Callable[[], None]) -> float:
    """That one run takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(name: str, folder: Path, rounds: int, threads: int) -> dict[str, float]:
    """Figures of one type."""
    path = folder / f"{name}.gguf"
    write_model(path, name, cache(partial(random_blocks, name)))
    unpacked = folder_of(path, folder / "cache", with_tokenizer=False)
    runs: dict[str, Callable[[], None]] = {
        "load": lambda: load(unpacked),
        "read": lambda: read_all(path, threads),
        "read through": lambda: read_through(path),
    }
    for run in runs.values():
        run()
    taken = [{name: seconds(run) for name, run in runs.items()} for _ in range(rounds)]
    size = path.stat().st_size
    path.unlink()
    return {
        "file_gb": round(size / 1e9, 3),
        "load_s": round(median(one["load"] for one in taken), 3),
        "read_s": round(median(one["read"] for one in taken), 3),
        "read_through_s": round(median(one["read through"] for one in taken), 3),
        "times_reading": round(median(one["load"] / one["read"] for one in taken), 2),
        "times_reading_through": round(median(one["load"] / one["read through"] for one in taken), 2),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.kinds:
            found[name] = measure(name, Path(folder), arguments.rounds, arguments.threads)
            print(name, found[name], f"load {os.getloadavg()[0]:.1f}", flush=True)
    if arguments.json:
        facts = {"threads": arguments.threads, "instruction_set": load_library()[0].instruction_set}
        write_report(arguments.json, "gguf_load", {**facts, "load": os.getloadavg()[0], "found": found})


if __name__ == "__main__":
    main()
