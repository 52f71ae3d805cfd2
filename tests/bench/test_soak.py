"""The soak benchmark: it tells what is lost, wrong and left, and how memory grows."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

import bench.soak
from bench.http_load import Pool
from bench.soak import Ask, Tally, engine_asks, has_all, press, router_asks, slope_mb_per_hour, soak, text_of

PART = b'data: {"choices": [{"index": %d, "delta": {"content": "a"}, "finish_reason": %s}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_the_slope_is_of_what_follows_the_first_fifth() -> None:
    climbing = [(float(second), 10**9 if second < 20 else 10**6 * second) for second in range(100)]
    assert slope_mb_per_hour(climbing) == pytest.approx(3600)
    assert slope_mb_per_hour([(float(second), 5) for second in range(100)]) == 0
    assert slope_mb_per_hour([]) == slope_mb_per_hour([(1.0, 1)]) == 0


def test_a_stream_is_right_only_with_all_its_ends() -> None:
    whole = PART % (0, b"null") + PART % (0, b'"length"') + PART % (1, b'"stop"') + DONE
    assert has_all(whole, 2)
    assert not has_all(whole, 1)
    assert not has_all(whole.removesuffix(DONE), 2)
    assert not has_all(b'data: {"error": {}}\n\n' + DONE, 1)
    assert text_of(PART % (0, b"null") + PART % (0, b"null") + DONE) == "aa"
    assert text_of(PART % (0, b"null")) == ""
    assert text_of(b'{"choices": [{"message": {"content": "yes"}}]}') == "yes"


@pytest.mark.parametrize("asks", [router_asks, engine_asks])
def test_load_is_mixed_and_the_same_for_a_seed(asks: Callable[[int], Iterator[Ask]]) -> None:
    drawn = [list(islice(asks(3), 400)) for _ in range(2)]
    assert [ask.body for ask in drawn[0]] == [ask.body for ask in drawn[1]]
    assert 1 <= sum(ask.leaves for ask in drawn[0]) < sum(bool(ask.body.get("stream")) for ask in drawn[0]) < 400


async def pressed(asks: Iterator[Ask], answers: list[bytes]) -> Tally:
    """What a server counts for that gives these answers, and then closes connections without one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n") and answers:
            body = answers.pop(0)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await press(Pool("127.0.0.1", port, keep_bodies=True), [asks], 50.0, 0.075)  # four turns


def test_right_wrong_and_lost_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.soak, "time", SimpleNamespace(monotonic=lambda: 0.0))  # no turn is late
    asks = iter([Ask("/", {}, b"yes".__eq__) for _ in range(4)])
    tally = asyncio.run(pressed(asks, [b"yes", b"no"]))
    assert (tally.right, tally.wrong, tally.lost, tally.faults) == (1, 1, 2, 3)
    assert [told.split(":")[0] for told in tally.told] == ["wrong", "lost", "lost"]


@pytest.mark.fleet
def test_a_router_loses_nothing_for_some_seconds(tmp_path: Path) -> None:
    options = argparse.Namespace(what="router", minutes=0.1, requests=None, clients=4)
    figures = soak(options, tmp_path)
    assert figures["right"] > 10
    assert (figures["lost"], figures["wrong"], figures["left_behind"]) == (0, 0, 0), json.dumps(figures)
    assert figures["memory"]["router"]["end_mb"] > 1
