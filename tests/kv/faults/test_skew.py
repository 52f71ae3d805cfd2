"""Engines of two revisions that meet during a roll-out: refused with the reason, and answered all the same."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pagefleet_engine.builtin import builtin_model_path

from tests.fakes.kv_pair import Pair
from tests.fakes.kv_serving import Questions, ServedEngine, until

pytestmark = pytest.mark.fleet


@pytest.fixture
def others(pair: Pair, tmp_path: Path) -> Iterator[dict[str, ServedEngine]]:
    """Prefill engines that do not fit, by what differs."""
    trained_further = tmp_path / "tiny"
    shutil.copytree(builtin_model_path("tiny"), trained_further)
    weights = trained_further / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[30_000] ^= 1
    weights.write_bytes(data)
    others = {
        "block_size": pair.engine("--block-size", "32"),
        "model": pair.engine(model=str(trained_further)),
    }
    for engine in others.values():
        engine.started()
    yield others
    for engine in others.values():
        engine.stop()


def test_engines_that_differ_are_refused_with_the_reason_and_decode_computes(
    pair: Pair, others: dict[str, ServedEngine]
) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            questions = Questions(http, pair.key)
            for number, (difference, other) in enumerate(others.items(), 1):
                assert other.facts.kv_transfer is not None
                assert pair.decode.facts.kv_transfer is not None
                assert other.facts.kv_transfer.compatibility != pair.decode.facts.kv_transfer.compatibility
                address = f"127.0.0.1:{other.facts.kv_transfer.port}"
                with pair.peers.open("a") as peers:
                    peers.write(f"{address}\n")
                while pair.decode.figure('peers{state="refused"}') < number:  # once it has read the list again
                    assert await questions.ask(other, pair.decode, address).num_passed() == 0
                reply = await questions.ask(other, pair.decode, address, on_failure="fail").decode
                assert reply.status_code == 503
                assert reply.json()["error"]["code"] == "kv_load_failed"
                assert f"{difference} " in pair.decode.log
                await until(lambda other=other: other.at_baseline)  # type: ignore[misc]
            await pair.link()
            await until(lambda: pair.decode.at_baseline)

    asyncio.run(scenario())
