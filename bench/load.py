"""How fast weights get from their files into a model, against a plain parallel read of the same files.

Rounds interleave, and shares are taken within a round. The plain read has the loader's threads and pieces, once into
new memory, as a model's weights need it, and once into buffers that are used again, which is all that the disk or the
page cache gives. Files are in the page cache unless `--cold` drops them before each measurement.

    python bench/load.py --json bench/results/load.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from pagefleet_engine.layers.weight import Placement, Weight
from pagefleet_engine.loader.checkpoint import TensorFile
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.loader.readers import PIECE_BYTES, read_into, reader_for
from pagefleet_engine.loader.safetensors import fill_from_safetensors
from pagefleet_engine.loader.weight_map import Destination
from pagefleet_engine.models.config_file import read_arch

from bench.models import LLAMA_125M, llama_checkpoint
from bench.report import write_report

GB = 1e9
SHAPE = LLAMA_125M | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Llama-3.2-1B's layers, 122 MB each in bfloat16."""


def read_plainly(path: Path, num_threads: int, new_memory: bool) -> None:
    """Read all of a file in parallel."""
    size = path.stat().st_size
    whole = torch.empty(size, dtype=torch.uint8) if new_memory else None
    local = threading.local()

    def read(start: int) -> None:
        if whole is not None:
            target = whole[start : start + PIECE_BYTES]
        else:
            if not hasattr(local, "buffer"):
                local.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            target = local.buffer[: min(PIECE_BYTES, size - start)]
        read_into(file.fileno(), start, target)

    with path.open("rb") as file, ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(0, size, PIECE_BYTES)))


def fill_slots(folder: Path, placement: Placement) -> list[torch.Tensor]:
    """Let the loader fill one slot per tensor, and keep what it installs as it is."""
    kept: list[torch.Tensor] = []
    file = TensorFile(folder / "model.safetensors", None)
    shapes = {name: file.shape(name) for name in file.names}
    destinations = {
        name: Destination(Weight((shape[0],), shape[1] if len(shape) > 1 else None, placement, kept.append), 0)
        for name, shape in shapes.items()
    }
    with torch.inference_mode():
        fill_from_safetensors(folder, destinations, tied_head=False)
    return kept


def measure(folder: Path, placement: Placement, rounds: int, cold: bool) -> list[dict[str, float]]:
    """GB/s of each way to read, per round."""
    path = folder / "model.safetensors"
    arch = read_arch(folder)
    num_threads = reader_for(placement.device).num_threads
    ways: dict[str, Callable[[], object]] = {
        "plain, new memory": lambda: read_plainly(path, num_threads, True),
        "plain, buffers used again": lambda: read_plainly(path, num_threads, False),
        "loader, into slots": lambda: fill_slots(folder, placement),
        "loader, model ready": lambda: load_model(folder, arch, placement, "auto", 0),
    }
    found = []
    for number in range(rounds + 1):
        figures = {}
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            if cold:
                drop_cached(path)
            started = time.monotonic()
            result = ways[name]()
            if placement.device.type == "cuda":
                torch.cuda.synchronize(placement.device)
            figures[name] = path.stat().st_size / GB / (time.monotonic() - started)
            del result
        if number:  # the first round warms up
            found.append({name: figures[name] for name in ways})
    return found


def drop_cached(path: Path) -> None:
    """Ask the system to forget the file's pages; it keeps those that are not on the disk yet."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def summarise(rounds: Sequence[dict[str, float]], device: str) -> dict[str, object]:
    """Medians of GB/s and of the shares within a round."""
    base = "plain, buffers used again" if device == "cuda" else "plain, new memory"
    medians = {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
    shares = {
        f"{name}, share of {base}": round(statistics.median(each[name] / each[base] for each in rounds), 2)
        for name in ("loader, into slots", "loader, model ready")
    }
    every = [{name: round(value, 2) for name, value in each.items()} for each in rounds]
    return {"gb_per_s": medians, "shares": shares, "rounds_gb_per_s": every}


def main() -> None:
    """Parse arguments, measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="122 MB each, beside 262 MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache before each measurement")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write the report here")
    options = parser.parse_args()
    placement = Placement(torch.bfloat16, torch.device(options.device), options.device == "cuda")
    with tempfile.TemporaryDirectory() as made:
        folder = llama_checkpoint(Path(made) / "model", SHAPE | {"num_hidden_layers": options.layers})
        size = (folder / "model.safetensors").stat().st_size
        rounds = measure(folder, placement, options.rounds, options.cold)
    figures = {"device": options.device, "cold": options.cold, "file_gb": round(size / GB, 2)}
    figures |= summarise(rounds, options.device)
    for name, value in (figures["gb_per_s"] | figures["shares"]).items():
        print(f"{name:62} {value:6.2f}")
    if options.json:
        write_report(options.json, "load", figures)


if __name__ == "__main__":
    main()
