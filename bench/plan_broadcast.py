"""How long a step's plan takes to rank processes: sent, there at the last rank, decoded by the last rank."""

from __future__ import annotations

import argparse
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
"""Between two plans, as a step takes its time; ranks are asleep then."""


class Handles(msgspec.Struct):
    """Of one reader."""

    index: int
    commands: RingHandles
    replies: RingHandles


def read(handles: Handles) -> None:
    """Be a rank: answer each plan by when it was there and when it was decoded, both of CLOCK_MONOTONIC."""
    reader, writer = RingReader(handles.commands, handles.index), RingWriter(handles.replies)
    while True:
        parts = reader.receive()
        assert parts is not None
        came = time.monotonic_ns()
        if not isinstance(decode_command(parts), Launch):
            return
        writer.send([msgspec.msgpack.encode((came, time.monotonic_ns()))], lambda: None)


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
    replies = [make_ring(1, 1 << 16) for _ in range(num_ranks)]
    children = []
    for index, ring in enumerate(replies):
        text = msgspec.json.encode(Handles(index, commands, ring)).decode()
        fds = (*commands.fds, *ring.fds)
        children.append(subprocess.Popen([sys.executable, __file__, "--reader", text], pass_fds=fds))
    writer, readers = RingWriter(commands), [RingReader(ring) for ring in replies]
    took: list[Sequence[float]] = []
    for step in range(num_steps):
        plan = plan_of(num_rows, step)
        time.sleep(PAUSE_S)
        began = time.monotonic_ns()
        writer.send(encode(Launch(plan)), lambda: None)
        sent = time.monotonic_ns()
        told = []
        for reader in readers:
            parts = reader.receive(60)
            assert parts is not None
            told.append(msgspec.msgpack.decode(parts[0]))
        came, decoded = (max(column) for column in zip(*told, strict=True))
        took.append([(at - began) / 1e3 for at in (sent, came, decoded)])
    writer.send(encode(Take()), lambda: None)
    for child in children:
        child.wait()
    for ring in (commands, *replies):
        for fd in ring.fds:
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
