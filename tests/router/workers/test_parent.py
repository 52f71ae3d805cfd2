"""Several real processes on one port: deaths, signals, sums."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_protocol.console_state import decode_state

from tests.fakes.faulty_engine import SSE_HEAD, Answer, Client, FaultyEngine, Seen, chat, chunked, post
from tests.fakes.fleet_processes import all_gone, child_pids

EVENT = b'data: {"n": 1}\n\n'
WITHIN_S = 120.0
NUM_STREAMS = 40
"""All on one worker once in 2 ** 39 runs."""


SILENT = b"pagefleet_router_silent_workers_total"
ANSWERED = b'pagefleet_router_requests_total{route="/v1/chat/completions",status="200"}'


def figure(page: bytes, name: bytes) -> float:
    """Return a figure of /metrics; 0 where there is none."""
    found = re.search(rb"^" + re.escape(name) + rb" (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


@dataclass
class Workers:
    """A `pagefleet route --workers 2` before one engine, whose streams last until `go_on` is set."""

    process: asyncio.subprocess.Process
    engine: FaultyEngine
    folder: Path
    go_on: asyncio.Event
    port: int = 0
    log: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[Client] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return child_pids(self.process.pid)

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())
            self.news.set()

    async def until_logged(self, pattern: str, times: int = 1) -> re.Match[str]:
        async with asyncio.timeout(WITHIN_S):
            while True:
                found = [match for match in (re.search(pattern, line) for line in self.log) if match]
                if len(found) >= times:
                    return found[-1]
                self.news.clear()
                await self.news.wait()

    async def ask(self, request: bytes) -> Answer:
        client = await self.connect()
        async with asyncio.timeout(WITHIN_S):
            await client.send(request)
            return await client.answer()

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def stream(self) -> tuple[Client, Answer]:
        """Begin a stream of the engine."""
        client = await self.connect()
        await client.send(post(chat(stream=True)))
        return client, await client.head()

    async def of_all(self, path: str) -> Answer:
        """Return an answer before and after which no worker was left out for not telling its part in time."""
        while True:
            before = await self._figure(SILENT)
            answer = await self.ask(f"GET {path} HTTP/1.1\r\nhost: r\r\n\r\n".encode())
            if await self._figure(SILENT) == before:
                return answer

    async def num_answered(self) -> float:
        return figure((await self.of_all("/metrics")).body, ANSWERED)

    async def _figure(self, name: bytes) -> float:
        return figure((await self.ask(b"GET /metrics HTTP/1.1\r\nhost: r\r\n\r\n")).body, name)

    async def ended(self) -> int:
        async with asyncio.timeout(WITHIN_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def workers(folder: Path, *flags: str) -> AsyncIterator[Workers]:
    go_on = asyncio.Event()

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if b'"stream": true' not in seen.body:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        writer.write(SSE_HEAD + chunked(EVENT))
        await go_on.wait()
        writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    engine = FaultyEngine(answer)
    await engine.start()
    settings = ["--engine", engine.url, "--model-name", "m", "--port", "0", "--workers", "2", *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagefleet_router.cli", *settings,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    made = Workers(process, engine, folder, go_on)
    reading = asyncio.create_task(made.read_log())
    pids: list[int] = []
    try:
        made.port = int((await made.until_logged(r"workers share http://127.0.0.1:(\d+)"))[1])
        await made.until_logged("is ready", times=2)
        pids = made.pids
        yield made
    finally:
        for client in made.clients:
            client.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await engine.kill()
        await reading
        assert all_gone(pids), "workers end with their parent"


def run(scenario: Callable[[Workers], Awaitable[None]], *flags: str) -> None:
    async def with_workers(folder: Path) -> None:
        async with workers(folder, *flags) as made:
            await scenario(made)

    with tempfile.TemporaryDirectory(prefix="pf-") as folder:  # a short path, which sockets need
        asyncio.run(with_workers(Path(folder)))


def test_any_worker_answers_for_all_and_only_they_can_listen_in() -> None:
    async def scenario(made: Workers) -> None:
        answers = [await made.ask(post(chat())) for _ in range(NUM_STREAMS)]
        assert {answer.status for answer in answers} == {200}
        assert {await made.num_answered() for _ in range(8)} == {NUM_STREAMS}
        state = decode_state((await made.of_all("/console/state")).body)
        assert (state.workers, len(state.requests), [one.phase for one in state.engines]) == (2, NUM_STREAMS, ["ready"])
        (folder,) = made.folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert sorted(path.name for path in folder.iterdir()) == ["0.sock", "1.sock", "owner.lock"]
        made.process.terminate()
        assert await made.ended() == 0
        assert not list(made.folder.iterdir())

    run(scenario)


def test_when_a_worker_is_killed_only_its_own_requests_end_and_new_ones_wait_for_the_next() -> None:
    async def scenario(made: Workers) -> None:
        streams = [await made.stream() for _ in range(NUM_STREAMS)]
        before = made.pids
        os.kill(before[0], signal.SIGKILL)
        new = await asyncio.gather(*(made.ask(post(chat())) for _ in range(NUM_STREAMS)))
        assert {answer.status for answer in new} == {200}, "connections wait in the socket that the next one inherits"
        made.go_on.set()
        ends = await asyncio.gather(*(client.rest(head) for client, head in streams))
        assert {answer.cut for answer in ends} == {True, False}
        assert all(answer.body.endswith(b"[DONE]\n\n") for answer in ends if not answer.cut)
        await made.until_logged("ended .signal 9.")
        await made.until_logged("is ready", times=3)
        assert len(made.pids) == 2
        assert before[1] in made.pids

    run(scenario)


def test_the_first_signal_lets_all_finish_what_they_have() -> None:
    async def scenario(made: Workers) -> None:
        streams = [await made.stream() for _ in range(NUM_STREAMS)]
        made.process.terminate()
        await made.until_logged("draining", times=2)
        made.go_on.set()
        ends = await asyncio.gather(*(client.rest(head) for client, head in streams))
        assert all(answer.body == EVENT + b"data: [DONE]\n\n" and not answer.cut for answer in ends)
        assert await made.ended() == 0

    run(scenario)


def test_the_second_signal_ends_all_at_once() -> None:
    async def scenario(made: Workers) -> None:
        streams = [await made.stream() for _ in range(NUM_STREAMS)]
        made.process.terminate()
        await made.until_logged("draining", times=2)
        made.process.send_signal(signal.SIGINT)
        assert await made.ended() == 1
        assert all([(await client.rest(head)).cut for client, head in streams])

    run(scenario, "--drain-timeout", "600")


def test_workers_end_when_their_parent_is_killed() -> None:
    async def scenario(made: Workers) -> None:
        pids = made.pids
        made.process.kill()
        await made.ended()
        await asyncio.to_thread(all_gone, pids)
        assert all_gone(pids, 0.0)

    run(scenario)


async def fails(*flags: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagefleet_router.cli", "--engine", "http://127.0.0.1:9", "--model-name", "m",
        "--workers", "2", *flags, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WITHIN_S):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def test_settings_that_cannot_work_end_all(tmp_path: Path) -> None:
    status, said = asyncio.run(fails("--port", "0", "--api-key-file", str(tmp_path / "none")))
    assert status == 2
    assert "cannot be read" in said


def test_a_port_that_is_taken_is_not_shared_with_a_stranger() -> None:
    async def scenario(made: Workers) -> None:
        status, said = await fails("--port", str(made.port))
        assert status == 2
        assert "cannot be listened on (Address already in use)" in said

    run(scenario)


STUBBORN = """
import os, signal, sys, time
from pagefleet_protocol.settings.log import set_up_logging
from pagefleet_router.workers.parent import Parent

def work(seat):
    if seat.index == 1 and not seat.is_replacement:
        time.sleep(600)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("works", seat.index, file=sys.stderr, flush=True)
    while True:
        seat.beat(time.monotonic() + 600)  # a busy machine may stall it for longer than it may be silent
        time.sleep(0.05)

set_up_logging("router", "pagefleet_router")
sys.exit(Parent(2, work, silent_s=5.0).run("127.0.0.1", 0))
"""


def test_a_worker_that_does_not_move_is_replaced() -> None:
    async def scenario() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STUBBORN, stderr=asyncio.subprocess.PIPE
        )  # fmt: skip
        made = Workers(process, FaultyEngine(), Path(), asyncio.Event())
        reading = asyncio.create_task(made.read_log())
        await made.until_logged("works 0")
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)  # past the moment when it would have looked
        process.send_signal(signal.SIGCONT)
        await made.until_logged("worker 1 has not moved")
        await made.until_logged("worker 1 ended .signal 9.")
        await made.until_logged("works 1")
        process.terminate()
        status = await made.ended()
        await reading
        assert not any("worker 0 " in line for line in made.log)
        return status

    assert asyncio.run(scenario()) == 0
