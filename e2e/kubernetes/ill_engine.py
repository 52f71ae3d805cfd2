"""Runs as an engine's container: the engine itself, behind a door that fails requests, or lets them wait.

The first argument is `fails`, or the seconds that each request waits; the others are the engine's. Probes pass.
"""

import asyncio
import contextlib
import signal
import sys

PORT, BEHIND = "8000", "8001"
ANSWER = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def admit(illness: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry a client's connection to the engine, whose requests come one by one and whole."""
    try:
        from_engine, to_engine = await asyncio.open_connection("127.0.0.1", int(BEHIND))
    except OSError:  # it still starts
        writer.close()
        return
    back = asyncio.create_task(carry(from_engine, writer))
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            if data.startswith(b"POST ") and illness == "fails":
                writer.write(ANSWER)
                break
            if data.startswith(b"POST "):
                await asyncio.sleep(float(illness))
            to_engine.write(data)
            await to_engine.drain()
    to_engine.close()
    await back


async def main(illness: str, arguments: list[str]) -> int:
    moved = [BEHIND if word == PORT else word for word in arguments]
    engine = await asyncio.create_subprocess_exec("pagefleet", *moved)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.terminate)
    async with await asyncio.start_server(lambda *both: admit(illness, *both), "0.0.0.0", int(PORT)):
        return await engine.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:])))
