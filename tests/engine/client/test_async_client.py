"""Real processes, real sockets, a fake model: what the client promises while its core lives, hangs and dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pagefleet_engine import LLM
from pagefleet_engine.client import async_client
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.core_process import CoreProcess, Surroundings
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.config import EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.stop import Stop
from pagefleet_engine.engine_core import admission
from pagefleet_engine.engine_core.messages import CoreStats, StepOutputs
from pagefleet_engine.engine_core.output_text import Chunk, OutputSoFar, OutputText
from pagefleet_engine.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    ProfileRefused,
    QueueFull,
    RequestFailed,
)
from pagefleet_engine.settings import engine_config
from pagefleet_engine.text.model_files import load_tokenizer
from pagefleet_protocol.beam_search import BeamSearchParams
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.small_model import write_small_model
from tests.fakes.small_tokenizers import byte_level_backend

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[3]
COMMAND = (
    sys.executable,
    "-c",
    "import sys; sys.path.insert(0, sys.argv[1]); from tests.fakes import scripted_core; "
    "from pagefleet_engine.engine_core.process import run_core; sys.exit(run_core(scripted_core.build))",
    str(ROOT),
)
TOKENIZER = Tokenizer(byte_level_backend(), {})
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@contextlib.asynccontextmanager
async def running(options: str = "", on_death: Callable[[], None] | None = None) -> AsyncIterator[AsyncEngineClient]:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_num_queued_reqs=8)
    config = EngineConfig(model=ModelConfig(model=f"fake?{options}"), scheduler=scheduler)
    client = await AsyncEngineClient.start(config, TOKENIZER, on_death, COMMAND)
    try:
        yield client
    finally:
        await client.close()


def test_loading_can_be_followed_until_it_is_over(tmp_path: Path) -> None:
    async def test() -> None:
        may_end = tmp_path / "loaded"
        config = EngineConfig(model=ModelConfig(model=f"fake?load_when={may_end}"))
        client = AsyncEngineClient([CoreProcess(config, COMMAND)], TOKENIZER, None)
        assert client.loading()[0].phase == "starting"
        loading = asyncio.create_task(client.load())
        await eventually(lambda: client.loading()[0].share == 0.75)
        assert client.loading()[0].phase == "weights"
        may_end.touch()
        await loading
        await client.close()

    run(test)


async def tokens_of(
    client: AsyncEngineClient, first: int, sampling: SamplingParams, request_id: str = "r"
) -> list[int]:
    asked = Generation(request_id, [[first]], sampling)
    return [token async for _, chunk in client.generate(asked) for token in chunk.token_ids]


async def eventually(holds: Callable[[], bool], within_s: float = 120.0) -> None:
    """Wait until something holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, "it never came to hold"
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 600))


async def whole_outputs(client: AsyncEngineClient) -> None:
    several = [tokens_of(client, 10 * n, SamplingParams(max_tokens=3), f"r{n}") for n in range(8)]
    assert await asyncio.gather(*several) == [[10 * n + 1, 10 * n + 2, 10 * n + 3] for n in range(8)]
    assert client.stats is not None
    assert client.stats.kv_usage == 0


async def same_name_twice(client: AsyncEngineClient) -> None:
    both = await asyncio.gather(*(tokens_of(client, first, SamplingParams(max_tokens=2)) for first in (1, 50)))
    assert both == [[2, 3], [51, 52]]


async def stop_string(client: AsyncEngineClient) -> None:
    sampling = SamplingParams(max_tokens=400, stop=(TOKENIZER.token_text(40),), ignore_eos=True)
    chunks = [chunk async for _, chunk in client.generate(Generation("s", [[30]], sampling))]
    assert "".join(chunk.text for chunk in chunks) == TOKENIZER.decode(range(31, 40))
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", sampling.stop[0])
    await eventually(lambda: client.stats is not None and client.stats.requests_running == 0)


async def early_close(client: AsyncEngineClient) -> None:
    output = client.generate(Generation("closed", [[10]], LONG))
    await anext(output)
    await output.aclose()
    await eventually(lambda: client.stats is not None and client.stats.kv_usage == 0)
    cancelled = asyncio.create_task(tokens_of(client, 10, LONG, "cancelled"))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await eventually(lambda: client.stats is not None and client.stats.kv_usage == 0)
    await eventually(lambda: client.health().stalled_s == 0)
    assert client.stats is not None
    assert client.stats.steps < 400, "neither came to its end"


async def last_transfers(client: AsyncEngineClient) -> None:
    client.drain()
    await client.transfers_over()
    stats = CoreStats(0, 0, 0.0, 0, 0, 0, 0)
    await client._cores[0].take(StepOutputs([], msgspec.structs.replace(stats, transfers_owed=2)))
    waiting = asyncio.create_task(client.transfers_over())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    await client._cores[0].take(StepOutputs([], stats))
    await waiting


async def refusals(client: AsyncEngineClient) -> None:
    with pytest.raises(InvalidRequest, match="token id 300"):
        await tokens_of(client, 300, SamplingParams())
    with pytest.raises(InvalidRequest) as long:
        await tokens_of(client, 1, SamplingParams(max_tokens=512))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest) as caught:
        async for _ in client.generate(Generation("r", [[1]], SamplingParams(), cache_salt="no spaces")):
            pass
    assert caught.value.param == "cache_salt"


async def several_choices(client: AsyncEngineClient) -> None:
    found: dict[int, list[int]] = {}
    async for index, chunk in client.generate(Generation("r", [[10], [50]], SamplingParams(n=3, max_tokens=2))):
        found.setdefault(index, []).extend(chunk.token_ids)
    assert found == {index: [11, 12] if index < 3 else [51, 52] for index in range(6)}
    assert not client._streams


def test_a_prompt_is_sent_once_and_not_checked_again_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many choices it has: checks and copies of 100,000 tokens for each of 128 held the loop for a second."""
    monkeypatch.setattr(admission, "Request", None)
    sent: list[Any] = []

    async def scenario() -> None:
        async with running() as client:
            monkeypatch.setattr(client._cores[0]._socket, "send", sent.append)
            prompt = [1] * 100_000
            output = client.generate(Generation("r", [prompt], SamplingParams(n=128)))
            first = asyncio.create_task(anext(output))
            await eventually(lambda: len(sent) > 0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await output.aclose()
            assert sent[0].prompt_token_ids is prompt
            assert [len(message.request_ids) for message in sent[1:]] == [128]
            assert not client._streams

    run(scenario)


async def garbage(client: AsyncEngineClient) -> None:
    for data in (b"", b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\x91" * 10_000, b"\x92\xa3add\x01"):
        client._cores[0]._socket.send_bytes(data)
    assert await tokens_of(client, 10, SamplingParams(max_tokens=1)) == [11]
    assert client.stats is not None
    assert client.stats.messages_dropped == 5


async def resumed(client: AsyncEngineClient) -> None:
    known = [91, 92, 93]
    shown = len(TOKENIZER.decode(known))
    rest = await _resume(client, known, shown)
    assert [token for chunk in rest for token in chunk.token_ids] == [94, 95]
    assert "".join(chunk.text for chunk in rest) == TOKENIZER.decode([94, 95])
    assert rest[-1].finish_reason == "length"
    more = await _resume(client, known, shown - 1)
    assert [token for chunk in more for token in chunk.token_ids] == [94, 95]
    assert "".join(chunk.text for chunk in more) == TOKENIZER.decode([91, 92, 93, 94, 95])[shown - 1 :]
    (end,) = await _resume(client, [91, 92, 93, 94, 95], 0)
    assert (end.text, list(end.token_ids), end.finish_reason) == (TOKENIZER.decode([91, 92, 93, 94, 95]), [], "length")
    for wrong in ([300], [91] * 6, [-1]):
        with pytest.raises(InvalidRequest) as caught:
            await _resume(client, wrong, 0)
        assert caught.value.param == "resumed_token_ids"
    with pytest.raises(InvalidRequest):
        await _resume(client, known, shown + 1)


async def _resume(client: AsyncEngineClient, known: list[int], num_chars: int) -> list[Chunk]:
    so_far = OutputSoFar(known, num_chars)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    return [chunk async for _, chunk in client.generate(Generation("r", [[90]], sampling, resumed=[so_far]))]


CHECKS = (
    several_choices,
    whole_outputs,
    same_name_twice,
    stop_string,
    early_close,
    refusals,
    garbage,
    resumed,
    last_transfers,
)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_healthy_core(check: Callable[[AsyncEngineClient], Awaitable[None]], in_flight: int) -> None:
    async def scenario() -> None:
        slowly = "&delay=0.05" if check is early_close else ""  # so that the answer does not end by itself
        async with running(f"in_flight={in_flight}{slowly}") as client:
            assert client.ready.vocab_size == 300
            await check(client)
            assert await tokens_of(client, 10, SamplingParams(max_tokens=3)) == [11, 12, 13]

    run(scenario)


def test_the_text_of_much_resumed_output_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_client, "_RESUMED_HERE", 2)
    on_the_loop: list[bool] = []
    resume = OutputText.resume

    def watched(text: OutputText, so_far: OutputSoFar, ended: Stop | None) -> Chunk | None:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return resume(text, so_far, ended)

    monkeypatch.setattr(OutputText, "resume", watched)

    async def scenario() -> None:
        async with running() as client:
            await resumed(client)

    run(scenario)
    assert on_the_loop == [False] * 4


def test_a_full_queue_is_told_and_recovers() -> None:
    async def scenario() -> None:
        async with running("delay=0.005") as client:
            crowd = [
                asyncio.create_task(tokens_of(client, 1, SamplingParams(max_tokens=20), f"r{n}")) for n in range(30)
            ]
            results = await asyncio.gather(*crowd, return_exceptions=True)
            refused = [result for result in results if isinstance(result, QueueFull)]
            assert refused
            assert all(error.retry_after_s >= 1 for error in refused)
            assert [result for result in results if not isinstance(result, QueueFull)] == [list(range(2, 22))] * (
                30 - len(refused)
            )

    run(scenario)


def test_a_killed_core_ends_every_request() -> None:
    async def scenario() -> None:
        deaths: list[float] = []
        async with running("delay=0.1", lambda: deaths.append(time.monotonic())) as client:
            crowd = [asyncio.create_task(tokens_of(client, 1, LONG, f"r{n}")) for n in range(8)]
            await eventually(lambda: client.stats is not None and client.stats.requests_running == 4)
            killed_at = time.monotonic()
            os.kill(client.core_pids[0], signal.SIGKILL)
            results = await asyncio.gather(*crowd, return_exceptions=True)
            assert time.monotonic() - killed_at < 60
            assert [type(result) for result in results] == [EngineDead] * 8
            assert len(deaths) == 1
            assert not client.health().alive
            with pytest.raises(EngineDead):
                await tokens_of(client, 1, SamplingParams())

    run(scenario)


def test_a_stopped_core_shows_as_stalled() -> None:
    async def scenario() -> None:
        async with running("delay=0.001") as client:
            await tokens_of(client, 1, SamplingParams(max_tokens=2))
            os.kill(client.core_pids[0], signal.SIGSTOP)
            assert client.health().stalled_s == 0, "an idle core that is stopped owes nothing yet"
            waiting = asyncio.create_task(tokens_of(client, 1, SamplingParams(max_tokens=2)))
            await eventually(lambda: client.health().stalled_s > 0.3)
            assert client.health().alive
            os.kill(client.core_pids[0], signal.SIGCONT)
            assert await waiting == [2, 3]
            assert client.health().stalled_s == 0

    run(scenario)


def test_signals_are_the_api_process_s_business() -> None:
    async def scenario() -> None:
        async with running() as client:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(client.core_pids[0], number)
            assert await tokens_of(client, 1, SamplingParams(max_tokens=1)) == [2]

    run(scenario)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_broken_device_fails_the_request_and_then_the_core(in_flight: int) -> None:
    async def scenario() -> None:
        died = asyncio.Event()
        async with running(f"fails=1&in_flight={in_flight}", died.set) as client:
            with pytest.raises(RequestFailed):
                await tokens_of(client, 1, SamplingParams())
            with pytest.raises(EngineDead):
                await tokens_of(client, 1, SamplingParams())
            await asyncio.wait_for(died.wait(), 30)

    run(scenario)


def test_a_core_that_lost_its_ranks_says_so_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        died = asyncio.Event()
        async with running("dead=1", died.set) as client:
            with pytest.raises(EngineDead):
                await tokens_of(client, 1, SamplingParams())
            await asyncio.wait_for(died.wait(), 30)

    run(scenario)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line]
    assert line.endswith("rank 1 was killed")


def test_a_client_that_cannot_deliver_is_dead_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: OutputText, output: object) -> None:
        raise RuntimeError("a bug of ours")

    async def scenario() -> None:
        died = asyncio.Event()
        async with running("", died.set) as client:
            monkeypatch.setattr(OutputText, "push", broken)
            with pytest.raises(EngineDead):
                await tokens_of(client, 1, SamplingParams())
            assert died.is_set()
            assert not client.health().alive

    run(scenario)


def test_the_real_core_gives_what_llm_gives(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 64, "device": "cpu"}
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    searched = Generation("beams", [[5], [6]], SamplingParams(n=3, max_tokens=6), beams=beams)

    async def through_the_socket() -> tuple[list[list[int]], list[tuple[int, Chunk]]]:
        config = engine_config({**settings, "model": str(folder)})
        client = await AsyncEngineClient.start(config, load_tokenizer(folder))
        try:
            drawn = await asyncio.gather(*(tokens_of(client, first, sampling, f"r{first}") for first in range(5, 9)))
            return drawn, [answer async for answer in client.generate(searched)]
        finally:
            await client.close()

    with LLM(str(folder), **settings) as llm:
        results = llm.generate([{"prompt_token_ids": [first]} for first in range(5, 9)], sampling)
        outputs = llm.beam_search([[5], [6]], beams)
    drawn, found = asyncio.run(through_the_socket())
    assert drawn == [result.outputs[0].token_ids for result in results]
    sequences = [sequence for output in outputs for sequence in output.sequences]
    assert [index for index, _ in found] == list(range(6))
    assert [[*prompt, *chunk.token_ids] for prompt, (_, chunk) in zip([[5]] * 3 + [[6]] * 3, found, strict=True)] == [
        sequence.tokens for sequence in sequences
    ]
    assert [(chunk.text, chunk.finish_reason) for _, chunk in found] == [
        (sequence.text, sequence.finish_reason) for sequence in sequences
    ]


def test_the_api_process_needs_no_tensor_library() -> None:
    script = "import sys, pagefleet_engine.client.async_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_model_that_cannot_be_loaded_is_told_in_the_core_s_words() -> None:
    async def scenario() -> None:
        with pytest.raises(ModelLoadError, match=r"^the fake model is torn$"):
            async with running("broken=torn"):
                pass

    run(scenario)


def test_a_setting_that_does_not_suit_the_model_is_no_fault_of_the_model() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match=r"^the fake model takes no length$") as caught:
            async with running("refuses=length"):
                pass
        assert not isinstance(caught.value, ModelLoadError)

    run(scenario)


def test_a_core_that_ends_without_a_word_is_noticed() -> None:
    async def scenario() -> None:
        config = EngineConfig(model=ModelConfig(model="fake"))
        with pytest.raises(ModelLoadError, match="exited with status 3"):
            await AsyncEngineClient.start(config, TOKENIZER, None, (sys.executable, "-c", "raise SystemExit(3)"))

    run(scenario)


def test_closing_ends_the_core_and_removes_its_folder() -> None:
    async def scenario() -> None:
        async with running("delay=0.1") as client:
            pid, folder = client.core_pids[0], client._cores[0].process.folder
            assert folder.stat().st_mode & 0o777 == 0o700
            waiting = asyncio.create_task(tokens_of(client, 1, LONG))
            await eventually(lambda: client.stats is not None and client.stats.requests_running == 1)
        with pytest.raises(EngineDead):
            await waiting
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario)


PARENT = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.engine.client.test_async_client import running, tokens_of, LONG
async def main():
    async with running("delay=0.01") as client:
        print(client.core_pids[0], client._cores[0].process.folder, flush=True)
        await tokens_of(client, 1, LONG)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_core_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(root=str(ROOT))], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    killed_at = time.monotonic()
    while _runs(int(pid)) or Path(folder).exists():
        assert time.monotonic() - killed_at < 120, "the core outlives its parent"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """False for a zombie too, which a container without an init keeps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_core_without_a_folder_records_no_profile() -> None:
    async def test() -> None:
        async with running() as client:
            with pytest.raises(ProfileRefused, match="records no profiles"):
                await client.start_profile()

    asyncio.run(test())


def test_who_waits_for_a_profile_is_told_of_the_end(tmp_path: Path) -> None:
    async def test() -> None:
        config = EngineConfig(model=ModelConfig(model="fake?"))
        client = AsyncEngineClient(
            [CoreProcess(config, COMMAND, Surroundings(profiler_dir=str(tmp_path)))], TOKENIZER, None
        )
        await client.load()
        os.kill(client.core_pids[0], signal.SIGSTOP)
        waiting = asyncio.create_task(client.start_profile())
        await asyncio.sleep(0)
        os.kill(client.core_pids[0], signal.SIGKILL)
        with pytest.raises(EngineDead):
            await waiting
        with pytest.raises(EngineDead):
            await client.stop_profile()
        await client.close()

    asyncio.run(test())
