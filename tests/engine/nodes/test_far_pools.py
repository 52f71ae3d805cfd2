"""KV pools over the network: what is read and written, and what becomes of faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.nodes import far_pools
from pagefleet_engine.nodes.far_pools import FarPools, PoolServer
from pagefleet_kv.port import KVShard
from pagefleet_protocol.fleet_key import FleetKey

KEY = FleetKey(b"s" * 40)
NUM_BLOCKS, LAYERS, LAYER_BYTES = 12, 3, 8
BLOCK_BYTES = LAYERS * 2 * LAYER_BYTES
SHARD = KVShard(range(LAYERS), range(1))


class RawPool:
    """A rank's blocks as bytes."""

    layer_bytes = BLOCK_BYTES

    def __init__(self, seed: int) -> None:
        shape = (NUM_BLOCKS, 1, 1, BLOCK_BYTES)
        self.blocks = np.random.default_rng(seed).integers(1, 256, shape, np.uint8)
        self.broken = False

    def read(self, blocks: Sequence[int], into: NDArray[np.uint8]) -> None:
        if self.broken:
            raise ValueError("the device is ill")
        into[:] = self.blocks[blocks]

    def write(self, source: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        self.blocks[blocks] = source


class Scene:
    def __init__(self) -> None:
        self.pools = {2: RawPool(2), 3: RawPool(3)}
        self.num_finished = 5
        self.is_over = False
        self.server = PoolServer(self.pools, lambda: self.num_finished, "127.0.0.1", KEY)
        self.far = FarPools("127.0.0.1", self.server.port, KEY, lambda: self.is_over, lambda: None)

    def close(self) -> None:
        self.is_over = True
        self.far.close()
        self.server.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(far_pools, "PART_BYTES", 2 * BLOCK_BYTES)
    made = Scene()
    yield made
    made.close()


def test_blocks_are_read_and_written_in_parts(scene: Scene) -> None:
    for rank, own in scene.pools.items():
        pool = scene.far.of_rank(rank, BLOCK_BYTES, SHARD)
        assert pool.layer_bytes == LAYER_BYTES
        blocks = [7, 1, 2, 11, 0]
        # As a rank's part of whole blocks lies in memory: not in one piece.
        host = np.zeros((5, LAYERS, 2, 3 * LAYER_BYTES), np.uint8)
        pool.read(blocks, host[..., LAYER_BYTES : 2 * LAYER_BYTES])
        assert host[..., LAYER_BYTES : 2 * LAYER_BYTES].tobytes() == own.blocks[blocks].tobytes()
        assert not host[..., :LAYER_BYTES].any()
        before = own.blocks.copy()
        given = np.random.default_rng(9).integers(1, 256, host.shape, np.uint8)[..., :LAYER_BYTES]
        pool.write(given, blocks)
        assert own.blocks[blocks].tobytes() == given.tobytes()
        others = [block for block in range(NUM_BLOCKS) if block not in blocks]
        assert (own.blocks[others] == before[others]).all()


def test_a_rank_that_cannot_copy_is_told_and_the_next_copy_is_right(scene: Scene) -> None:
    pool = scene.far.of_rank(2, BLOCK_BYTES, SHARD)
    host = np.zeros((7, LAYERS, 2, LAYER_BYTES), np.uint8)
    scene.pools[2].broken = True
    with pytest.raises(OSError, match="could not copy K/V: ValueError: the device is ill"):
        pool.read(range(7), host)
    scene.pools[2].broken = False
    pool.read(range(7), host)
    assert host.tobytes() == scene.pools[2].blocks[:7].tobytes()


def test_a_copy_may_wait_for_steps(scene: Scene) -> None:
    scene.far.wait(5)
    waited = threading.Thread(target=scene.far.wait, args=(6,))
    waited.start()
    waited.join(0.2)
    assert waited.is_alive()
    scene.num_finished = 6
    waited.join(30)
    assert not waited.is_alive()


def test_nobody_waits_for_a_machine_that_is_gone(scene: Scene) -> None:
    said: list[str] = []

    def wait() -> None:
        try:
            scene.far.wait(9)
        except OSError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    scene.is_over = True
    waiting.join(30)
    assert said == ["the engine's ranks are gone"]


def test_nobody_waits_for_a_connection_that_is_lost() -> None:
    began = threading.Event()

    def num_finished() -> int:
        began.set()
        return 0

    server = PoolServer({}, num_finished, "127.0.0.1", KEY)
    lost = threading.Event()
    far = FarPools("127.0.0.1", server.port, KEY, lambda: False, lost.set)
    said: list[str] = []

    def wait() -> None:
        try:
            far.wait(1)
        except OSError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(60)
    server.close()
    waiting.join(60)
    assert len(said) == 1
    assert "was lost" in said[0] or "ranks are gone" in said[0]
    assert lost.is_set() == ("was lost" in said[0])
    far.close()


def test_who_has_another_key_reads_nothing(scene: Scene) -> None:
    is_over = threading.Event()
    stranger = FarPools("127.0.0.1", scene.server.port, FleetKey(b"t" * 40), is_over.is_set, lambda: None)
    threading.Timer(5.0, is_over.set).start()
    with pytest.raises(OSError, match=r"(the engine's ranks are gone|was lost)"):
        stranger.of_rank(2, BLOCK_BYTES, SHARD).read([0], np.zeros((1, LAYERS, 2, LAYER_BYTES), np.uint8))
    stranger.close()


def test_an_address_that_is_not_this_machines_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"K/V cannot be asked for at 192\.0\.2\.1"):
        PoolServer({}, lambda: 0, "192.0.2.1", KEY)
