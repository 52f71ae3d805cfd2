"""pagefleet against transformers on a named shape with random weights: ratios of tokens per second in the same run.

transformers runs as `generate` one by one and in a static batch, with a static cache (which it compiles on a GPU), and
with its own continuous batching. Each runs in a process of its own, all are loaded at once and measured one after the
other. A peer that fails, or takes more than its share of the time, is reported and leaves the others' rows.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine.bench.shapes import named_shapes, write_shape

from bench.engines.client import EngineFailedError, EngineProcess, EngineSpec
from bench.report import write_report

Load = list[list[int]]
Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, all with answers of one length."""

    num_requests: int
    input_lens: tuple[int, int]
    output_len: int
    at_once: bool

    def draw(self, rng: random.Random, vocab_size: int) -> Load:
        """New prompts, so that nothing is cached."""
        lens = [rng.randint(*self.input_lens) for _ in range(self.num_requests)]
        return [[rng.randrange(10, vocab_size) for _ in range(length)] for length in lens]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of transformers."""

    name: str
    traffic: str
    options: Mapping[str, Any] = field(default_factory=dict)


PEERS = (
    Peer("generate, one by one", "one by one"),
    Peer("generate, static batch", "together", {"batch_size": 1024}),
    Peer("continuous batching", "together", {"continuous": True}),
    Peer("static cache, compiled", "one by one", {"cache": "static"}),
)


def traffics(tiny: bool) -> dict[str, Traffic]:
    """What is asked of every engine, by name."""
    if tiny:
        return {"one by one": Traffic(2, (8, 8), 4, False), "together": Traffic(3, (4, 8), 4, True)}
    return {"one by one": Traffic(2, (128, 128), 64, False), "together": Traffic(64, (64, 256), 64, True)}


def tokens_per_s(engine: EngineProcess, traffic: Traffic, load: Load) -> float:
    """Output tokens per second."""
    parts = [load] if traffic.at_once else [[prompt] for prompt in load]
    seconds = sum(engine.generate(part, [traffic.output_len] * len(part))[0] for part in parts)
    return traffic.num_requests * traffic.output_len / seconds


def measure(engine: EngineProcess, traffic: Traffic, vocab_size: int, repeats: int) -> float:
    """The best of `repeats` rounds after one to warm up: compiling, capturing and allocators do not count."""
    rates = [
        tokens_per_s(engine, traffic, traffic.draw(random.Random(turn), vocab_size)) for turn in range(repeats + 1)
    ]
    return max(rates[1:])


def specs(tiny: bool) -> list[EngineSpec]:
    """pagefleet first; `tiny` on one thread of the CPU."""
    ours: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}
    ours |= {"device": "cpu", "num_threads": 1} if tiny else {"gpu_memory_utilization": 0.4}
    place = {"device": "cpu", "num_threads": 1, "num_blocks": 64} if tiny else {}
    theirs = [
        EngineSpec(peer.name, "transformers", sys.executable, {"dummy": True, **place, **peer.options})
        for peer in PEERS
    ]
    return [EngineSpec("pagefleet", "pagefleet", sys.executable, ours), *theirs]


def start(wanted: Sequence[EngineSpec], model: Path, logs: Path) -> dict[str, EngineProcess | EngineFailedError]:
    """All of them, loading at the same time."""

    def one(index: int) -> EngineProcess | EngineFailedError:
        try:
            return EngineProcess(wanted[index], model, logs / f"engine-{index}.log")
        except EngineFailedError as error:
            return error

    with ThreadPoolExecutor(len(wanted)) as pool:
        started = pool.map(one, range(len(wanted)))
        return {spec.name: engine for spec, engine in zip(wanted, started, strict=True)}


def compare(
    engines: Mapping[str, EngineProcess | EngineFailedError],
    rate: Callable[[EngineProcess, str], float],
    tell: Callable[[Figures], None],
) -> Figures:
    """Measure ours, then each peer; `tell` gets all figures after each, as a later one may take too long."""
    pagefleet = engines["pagefleet"]
    if isinstance(pagefleet, EngineFailedError):
        raise pagefleet
    ours = {name: rate(pagefleet, name) for name in dict.fromkeys(peer.traffic for peer in PEERS)}
    pagefleet.close()  # its memory is for those who follow
    figures: Figures = {f"pagefleet, {name}": {"tokens_per_s": found} for name, found in ours.items()}
    for peer in PEERS:
        engine = engines[peer.name]
        try:
            if isinstance(engine, EngineFailedError):
                raise engine
            theirs = rate(engine, peer.traffic)
        except (EngineFailedError, BrokenPipeError) as error:
            figures[peer.name] = {"failed": str(error)[-500:]}
        else:
            figures[peer.name] = {"tokens_per_s": theirs, "pagefleet_over_peer": ours[peer.traffic] / theirs}
        tell(figures)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=named_shapes(), default="qwen3-0.6b")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0, help="For all of it. Default: %(default)g.")
    parser.add_argument(
        "--tiny", action="store_true", help="A few tokens on one thread of the CPU, to see that it runs."
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    vocab_size = int(named_shapes()[arguments.shape]["vocab_size"])
    traffic = traffics(arguments.tiny)
    give_up_at = time.monotonic() + arguments.seconds
    to_come = len(traffic) + len(PEERS)

    def rate(engine: EngineProcess, name: str) -> float:
        nonlocal to_come
        share = max(0.0, give_up_at - time.monotonic()) / max(1, to_come)
        to_come -= 1
        with engine.within(share):
            return measure(engine, traffic[name], vocab_size, arguments.repeats)

    def tell(figures: Figures) -> None:
        print("{}: {}".format(*list(figures.items())[-1]), flush=True)
        if arguments.json:
            write_report(arguments.json, "peers", figures)

    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        folder = Path(scratch)
        engines = start(specs(arguments.tiny), write_shape(arguments.shape, folder), folder)
        try:
            compare(engines, rate, tell)
        finally:
            for engine in engines.values():
                if isinstance(engine, EngineProcess):
                    engine.close()


if __name__ == "__main__":
    main()
