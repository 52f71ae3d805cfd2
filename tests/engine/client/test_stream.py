import asyncio

import pytest
from pagefleet_engine.client.stream import Mailbox
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.errors import EngineDead


def test_a_slow_reader_gets_one_larger_chunk() -> None:
    async def read() -> list[str]:
        box = Mailbox()
        texts = []
        box.put(0, Chunk("a", [1]))
        texts.append((await box.get())[1].text)
        for text in "bcd":
            box.put(0, Chunk(text, [2]))
        texts.append((await box.get())[1].text)
        return texts

    assert asyncio.run(read()) == ["a", "bcd"]


def test_a_reader_waits_for_news() -> None:
    async def read() -> str:
        box = Mailbox()
        waiting = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        box.put(0, Chunk("late", [1]))
        return (await waiting)[1].text

    assert asyncio.run(read()) == "late"


def test_an_error_comes_after_what_was_delivered_and_stays() -> None:
    async def read() -> None:
        box = Mailbox()
        box.put(0, Chunk("a", [1]))
        box.fail(EngineDead("gone"))
        assert (await box.get())[1].text == "a"
        for _ in range(2):
            with pytest.raises(EngineDead, match="gone"):
                await box.get()

    asyncio.run(read())


def test_the_choice_that_waits_longest_is_next() -> None:
    async def read() -> list[tuple[int, str]]:
        box = Mailbox()
        for index, text in ((2, "a"), (0, "b"), (2, "c")):
            box.put(index, Chunk(text, [1]))
        first = [await box.get() for _ in range(2)]
        box.put(1, Chunk("d", [1]))
        return [(index, chunk.text) for index, chunk in [*first, await box.get()]]

    assert asyncio.run(read()) == [(2, "ac"), (0, "b"), (1, "d")]
