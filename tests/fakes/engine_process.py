"""A stand-in for `pagefleet serve`: answers at once, or misbehaves as its flags say. No test in here.

It repeats `--marker`, so that tests see which revision answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--dtype")
    parser.add_argument("--max-model-len")
    parser.add_argument("--quantization")
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--rank-wait-timeout", type=float)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--drain-timeout", type=float)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--kv-events-port", type=int)
    parser.add_argument("--fleet-key-file", type=Path)
    parser.add_argument("--kv-connector")
    parser.add_argument("--kv-role", default="both")
    parser.add_argument("--kv-host")
    parser.add_argument("--kv-port", type=int)
    parser.add_argument("--kv-peers")
    parser.add_argument("--kv-data-plane")
    parser.add_argument("--kv-send-type")
    parser.add_argument("--kv-offload-memory", type=int)
    parser.add_argument("--kv-offload-disk", type=int)
    parser.add_argument("--kv-offload-dir", type=Path)
    parser.add_argument("--kv-offload-policy")
    parser.add_argument("--kv-form", default="ab", help="two digits of its compatibility")
    parser.add_argument("--marker", default="one")
    parser.add_argument("--answer-s", type=float, default=0.0)
    parser.add_argument("--answer-when", type=Path, help="not before this file exists")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--refuse-to-start", action="store_true")
    parser.add_argument("--check", action="store_true", help="end at once")
    parser.add_argument("--mistaken", action="store_true", help="end with status 2, but not when checked")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--with-child", action="store_true")
    return parser.parse_args()


class FakeEngine:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.ready = False
        self.sick = False
        self.num_running = 0
        self.stopping = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        if not self.arguments.ignore_sigterm:
            loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
        server = await asyncio.start_server(self.answer, self.arguments.host, self.arguments.port)
        print("loading weights", flush=True)
        await asyncio.sleep(self.arguments.load_s)
        self.ready = not self.arguments.never_ready
        await self.stopping.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.arguments.drain_timeout):
                while self.num_running:  # noqa: ASYNC110 - a fake may poll
                    await asyncio.sleep(0.01)
        server.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b" ", 2)
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
            )
            await reader.readexactly(length)
            status, body = await self.route(method.decode(), path.decode())
            text = json.dumps(body).encode()
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(text)) + text
            )
            await writer.drain()
        writer.close()

    async def route(self, method: str, path: str) -> tuple[int, dict[str, object]]:
        if path == "/livez":
            return (503 if self.sick else 200), {}
        if path == "/readyz":
            return (200 if self.ready and not self.sick and not self.stopping.is_set() else 503), {}
        if path == "/sick":
            self.sick = True
            return 200, {}
        if path == "/internal/v1/facts":
            return 200, self.facts()
        if self.stopping.is_set():
            return 503, {"error": "drains"}
        self.num_running += 1
        arguments = self.arguments
        await asyncio.sleep(arguments.answer_s)
        if arguments.answer_when is not None:
            print("asked", flush=True)
            while not arguments.answer_when.exists():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)
        self.num_running -= 1
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 200, {
            "marker": arguments.marker,
            "model": arguments.served_model_name,
            "location": arguments.model,
            "threads": arguments.num_threads,
            "pid": os.getpid(),
            "devices": seen,
            "note": os.environ.get("FLEET_NOTE"),
            "role": arguments.kv_role,
        }

    def facts(self) -> dict[str, object]:
        arguments = self.arguments
        transfer = {"role": arguments.kv_role, "port": arguments.kv_port, "bytes_per_token": 64}
        counts = dict.fromkeys(("block_size", "num_blocks", "max_model_len", "max_num_seqs", "vocab_size"), 16)
        return {
            **counts,
            "max_num_batched_tokens": 64,
            "incarnation": "0" * 32,
            "model": "m",
            "scope": "s",
            "kv_transfer": {**transfer, "compatibility": arguments.kv_form * 32} if arguments.kv_connector else None,
        }


def main() -> None:
    arguments = parse()
    if arguments.check:
        sys.exit(0)
    if arguments.mistaken:
        print("pagefleet serve: error: a mistake", file=sys.stderr)
        sys.exit(2)
    if arguments.refuse_to_start:
        sys.exit(f"error: model folder missing: {arguments.model}")
    if arguments.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.with_child:
        child = os.fork()
        if child == 0:
            signal.pause()  # an engine core that does not notice that its server has gone
        print(f"child {child}", flush=True)
    if arguments.kv_offload_dir:
        arguments.kv_offload_dir.mkdir(parents=True, exist_ok=True)
        with (arguments.kv_offload_dir / "starts").open("a") as starts:
            starts.write(f"{arguments.kv_offload_memory}\n")
    asyncio.run(FakeEngine(arguments).serve())


if __name__ == "__main__":
    main()
