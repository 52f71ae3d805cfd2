"""How long a step's plan takes to rank processes: sent, there at the last rank, decoded by the last rank.

Ranks note their times in shared memory: as in the engine, nobody answers a plan, and so no answer delays another rank.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
from pagefleet_engine.core.step import ScheduledRow, ScheduledRows, StepPlan
from pagefleet_engine.executor.messages import Launch, Take, decode_command, encode
from pagefleet_engine.executor.ring import RingHandles, RingReader, RingWriter, make_ring

from bench.report import write_report

PAUSE_S = 0.002
"""After each plan, as a step takes its time; ranks are asleep then."""


class Handles(msgspec.Struct):
    """Of one reader."""

    index: int
    commands: RingHandles
    stamps: int
    """Descriptor of the memory for times."""


def map_stamps(memory: int, num_ranks: int) -> memoryview:
    """Per rank: when it had the last plan, and when it had decoded that; nanoseconds of CLOCK_MONOTONIC."""
    return memoryview(mmap.mmap(memory, num_ranks * 16)).cast("Q", (num_ranks, 2))


def read(handles: Handles) -> None:
    """Be a rank: note of each plan when it was there and when it was decoded."""
    reader = RingReader(handles.commands, handles.index)
    stamps = map_stamps(handles.stamps, len(handles.commands.frames))
    while True:
        parts = reader.receive()
        assert parts is not None
        came = time.monotonic_ns()
        if not isinstance(decode_command(parts), Launch):
            return
        stamps[handles.index, 0] = came
        stamps[handles.index, 1] = time.monotonic_ns()


def plan_of(num_rows: int, step: int) -> StepPlan:
    """A step of requests that decode; every sixteenth gets a block."""
    rows = [
        ScheduledRow(f"chatcmpl-{row:032x}", 500 + step, 1, ((row,),) if row % 16 == step % 16 else (), True)
        for row in range(num_rows)
    ]
    return StepPlan(step, (), (), ScheduledRows.of(rows), num_rows)


def measure(num_ranks: int, num_rows: int, num_steps: int) -> tuple[float, float, float]:
    """Median microseconds from the beginning of `encode` until the plan is sent, at the last rank, decoded there."""
    commands = make_ring(num_ranks, 1 << 22)
    memory = os.memfd_create("stamps")
    os.ftruncate(memory, num_ranks * 16)
    stamps, ranks = map_stamps(memory, num_ranks), range(num_ranks)
    children = []
    for index in ranks:
        text = msgspec.json.encode(Handles(index, commands, memory)).decode()
        children.append(
            subprocess.Popen([sys.executable, __file__, "--reader", text], pass_fds=(*commands.fds, memory))
        )
    writer = RingWriter(commands)
    took: list[Sequence[float]] = []
    for step in range(num_steps):
        plan = plan_of(num_rows, step)
        began = time.monotonic_ns()
        writer.send(encode(Launch(plan)), lambda: None)
        sent = time.monotonic_ns()
        time.sleep(PAUSE_S)
        while min(stamps[rank, 1] for rank in ranks) < began:
            time.sleep(PAUSE_S)
        came, decoded = (max(stamps[rank, which] for rank in ranks) for which in (0, 1))
        took.append([(at - began) / 1e3 for at in (sent, came, decoded)])
    writer.send(encode(Take()), lambda: None)
    for child in children:
        child.wait()
    for fd in (*commands.fds, memory):
        os.close(fd)
    sent_us, came_us, decoded_us = (statistics.median(column) for column in zip(*took[num_steps // 5 :], strict=True))
    return sent_us, came_us, decoded_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", default="plan_broadcast.json")
    args = parser.parse_args()
    if args.reader:
        read(msgspec.json.decode(args.reader, type=Handles))
        return
    figures: dict[str, object] = {"rows": args.rows, "load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    for ranks in args.ranks:
        sent, came, decoded = measure(ranks, args.rows, args.steps)
        figures[f"ranks_{ranks}"] = {"sent_us": sent, "at_last_rank_us": came, "decoded_by_last_rank_us": decoded}
        print(f"{ranks} ranks: sent {sent:.0f} us, at the last rank {came:.0f} us, decoded there {decoded:.0f} us")
    write_report(args.output, "plan_broadcast", figures)


if __name__ == "__main__":
    main()
