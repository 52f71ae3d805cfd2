"""An OpenAI server that refuses requests over its rate, as a program; with too many seats it does not start.

`python -m tests.fakes.tuned_server MODEL --max-num-batched-tokens=N --max-num-seqs=N --port N`
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import sys

TOO_MANY_SEATS = 256
_RATE = 300.0
_WINDOW = 16
"""Arrivals that the server judges its load by: a load of a fraction of a second shows what one of a minute would."""


async def serve(port: int) -> None:
    """Answer until ended."""
    arrivals: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    now = asyncio.get_running_loop().time

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                if b"/completions" not in head:
                    body = json.dumps({"data": [{"id": "fake"}]}).encode()
                    kind = b"content-type: application/json"
                    writer.write(b"HTTP/1.1 200 OK\r\n%s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body))
                    continue
                arrivals.append(now())
                took = arrivals[-1] - arrivals[0]
                if len(arrivals) == _WINDOW and (_WINDOW - 1) / max(took, 1e-9) > _RATE:
                    writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
                    continue
                await asyncio.sleep(0.01)
                kind = b"content-type: text/event-stream"
                body = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
                writer.write(b"HTTP/1.1 200 OK\r\n%s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body))

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("max-num-batched-tokens", "max-num-seqs", "port"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    if given.max_num_seqs == TOO_MANY_SEATS:
        sys.exit("first line\nout of memory: give less")
    asyncio.run(serve(given.port))
