import asyncio

import pytest
from pagefleet_engine.client.stream import OutputStream
from pagefleet_engine.engine_core.output_text import Chunk, OutputText
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.sampling_params import SamplingParams


def stream() -> OutputStream:
    return OutputStream(OutputText(None, SamplingParams()))


def test_a_slow_reader_gets_one_larger_chunk() -> None:
    async def read() -> list[str]:
        box = stream()
        texts = []
        box.put(Chunk("a", [1]))
        texts.append((await box.get()).text)
        for text in "bcd":
            box.put(Chunk(text, [2]))
        texts.append((await box.get()).text)
        return texts

    assert asyncio.run(read()) == ["a", "bcd"]


def test_a_reader_waits_for_news() -> None:
    async def read() -> str:
        box = stream()
        waiting = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        box.put(Chunk("late", [1]))
        return (await waiting).text

    assert asyncio.run(read()) == "late"


def test_an_error_comes_after_what_was_delivered_and_stays() -> None:
    async def read() -> None:
        box = stream()
        box.put(Chunk("a", [1]))
        box.fail(EngineDead("gone"))
        assert (await box.get()).text == "a"
        for _ in range(2):
            with pytest.raises(EngineDead, match="gone"):
                await box.get()

    asyncio.run(read())
