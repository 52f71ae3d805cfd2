"""Copies of a model that are on two machines, which network namespaces play: tokens of one rank, and what faults do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.core_ahead import CORE_COMMAND
from pagefleet_engine.client.core_process import Surroundings
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.settings import engine_config

from tests.engine.client.test_async_client import TOKENIZER, eventually
from tests.engine.client.test_waves import OneRank, all_tokens, of_one_rank, tokens
from tests.engine.test_nodes import HERE, Node, machine
from tests.fakes.fleet_processes import all_gone
from tests.fakes.free_ports import free_ports
from tests.fakes.network_namespace import NetworkNamespace
from tests.fakes.slow_requests import slow

__all__ = ["machine", "of_one_rank"]
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(900)]


class Machines:
    """A leader here, in this process, and a follower there."""

    def __init__(self, there: NetworkNamespace, folder: Path, settings: dict[str, Any]) -> None:
        self._there, self._key = there, folder / "key"
        self._key.write_text("k" * 40)
        copies = settings["data_parallel_size"]
        self.settings = {
            "model": "builtin://tiny",
            "device": "cpu",
            "dtype": "float32",
            "num_kv_blocks": 256,
            "nnodes": 2,
            "master_addr": HERE,
            "master_port": free_ports(copies),
            **settings,
        }
        self.followers: list[Node] = []

    def follow(self, **other: Any) -> Node:
        """Start a follower, with these settings changed."""
        given = {**self.settings, "node_rank": 1, **other}
        model = str(given.pop("model"))
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()
        ]
        own = (*flags, "--headless", "--port=0", f"--fleet-key-file={self._key}")
        command = [*self._there.within, sys.executable, "-m", "pagefleet_engine.cli", model, *own]
        self.followers.append(Node(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        return self.followers[-1]

    async def lead(self) -> AsyncEngineClient:
        around = Surroundings(fleet_key_file=str(self._key))
        return await AsyncEngineClient.start(engine_config(self.settings), TOKENIZER, None, CORE_COMMAND, around)

    def close(self) -> None:
        for follower in self.followers:
            follower.process.kill()
            follower.end()


Make = Callable[..., Machines]


@pytest.fixture
def machines(machine: NetworkNamespace, tmp_path: Path) -> Iterator[Make]:
    made: list[Machines] = []

    def make(**settings: Any) -> Machines:
        made.append(Machines(machine, tmp_path, {"data_parallel_size": 2, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 800))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"data_parallel_size": 1, "pipeline_parallel_size": 2}),
        ("qwen3_moe", {"enable_expert_parallel": True, "all2all_backend": "all2allv"}),
        ("qwen3_moe", {"enable_expert_parallel": True, "tensor_parallel_size": 2, "enable_eplb": True}),
        pytest.param(
            "qwen3_moe",
            {
                "enable_expert_parallel": True,
                "data_parallel_size": 4,
                "enable_dbo": True,
                "dbo_decode_token_threshold": 2,
                "dbo_prefill_token_threshold": 4,
            },
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "qwen2_moe", {"enable_expert_parallel": True, "pipeline_parallel_size": 2}, marks=pytest.mark.nightly
        ),
    ],
    ids=str,
)
def test_tokens_of_copies_are_those_of_one_rank(
    machines: Make,
    family: str,
    settings: dict[str, Any],
    make_checkpoint: Callable[..., Path],
    of_one_rank: OneRank,
) -> None:
    model = str(make_checkpoint(family))
    expected = of_one_rank(model)

    async def test() -> None:
        two = machines(model=model, **settings)
        follower = two.follow()
        client = await two.lead()
        assert await all_tokens(client) == expected
        if client.rank_stats[1:]:
            assert all(stats is not None and stats.steps for stats in client.rank_stats), "each copy computed some"
        await client.close()
        assert await asyncio.to_thread(follower.end) == 1
        assert "the leader" in follower.log[-1]

    run(test())


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_machine_that_is_lost_ends_all(
    machines: Make, machine: NetworkNamespace, how: str, make_checkpoint: Callable[..., Path]
) -> None:
    async def test() -> None:
        two = machines(model=str(make_checkpoint("qwen3_moe")), enable_expert_parallel=True, logits_processors="slow")
        follower = two.follow()
        client = await two.lead()
        await tokens(client, 0)
        running = [asyncio.create_task(tokens(client, number, 400, **slow())) for number in range(8)]
        await eventually(lambda: client.stats is not None and client.stats.steps > 20, 200)
        pids = client.core_pids
        if how == "killed":
            os.kill(follower.process.pid, signal.SIGKILL)
        else:
            machine.cut("nodes")
        for task in running:
            with pytest.raises(EngineDead):
                await task
        await client.close()
        assert await asyncio.to_thread(follower.end) == (1 if how == "cut" else -9)
        assert all_gone([*pids, follower.process.pid])

    run(test())


def test_who_counts_other_copies_is_told_at_once(machines: Make) -> None:
    """Its copies would be at ports that the leader does not have."""

    async def test() -> None:
        two = machines()
        leading = asyncio.create_task(two.lead())
        follower = two.follow(data_parallel_size=4)
        assert await asyncio.to_thread(follower.end) == 2
        assert (
            "data_parallel_size is 4 there, and 2 at the leader: give all nodes the same settings" in follower.log[-1]
        )
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)

    run(test())
