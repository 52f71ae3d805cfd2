"""Every kind of connector as two ends, which may be one: K/V goes in at one and comes out at the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagefleet_engine.core.request import Request
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.connectors import build_connector
from pagefleet_kv.port import EngineIdentity, EngineSide
from pagefleet_protocol.kv_blob import KvShape
from pagefleet_protocol.kv_handoff import KvTransfer

from tests.fakes.byte_pages import SHAPE, BytePages, engine_side
from tests.fakes.connector_scene import ConnectorScene, make_request

NUM_BLOCKS = 512


@dataclass(slots=True)
class Ends:
    """Where K/V is computed, and where it is wanted."""

    giver: ConnectorScene
    taker: ConnectorScene
    legs: Callable[[int], tuple[KvTransfer | None, KvTransfer | None]]
    stores: bool
    """Whether it keeps what nobody asks for, and gives it as often as it is asked."""
    num_requests: Iterator[int]

    def request(self, num_blocks: int) -> tuple[Request, Request]:
        """One prompt, as each end knows it."""
        number = next(self.num_requests)
        prompt = self.giver.prompt(num_blocks, 1000 * number)
        given, wanted = make_request(prompt, f"given{number}"), make_request(prompt, f"wanted{number}")
        given.transfer, wanted.transfer = self.legs(number)
        return given, wanted

    def give(self, request: Request) -> int | None:
        """Compute a prompt and end; returns what the connector says to the save."""
        number = self.giver.save(request)
        self.giver.connector.ended(request, True)
        if self.stores and number is not None:  # else it may be kept until it is taken
            self.giver.wait_for(lambda: number in self.giver.saved)
        return number


def _end(kind: str, side: EngineSide, settings: Mapping[str, Any]) -> tuple[ConnectorScene, int | None]:
    built = build_connector(KVTransferConfig(kv_connector=kind, **settings), side)
    pages = side.pages
    assert isinstance(pages, BytePages)
    return ConnectorScene(built.connector, pages), built.port


@contextmanager
def connected(kind: str, folder: Path, *, on_host: bool = True, shape: KvShape = SHAPE) -> Iterator[Ends]:
    """The ends of a connector (`p2p`, `file`, `offload`, or several), closed with the block."""
    key_file = folder / "fleet-key"
    key_file.write_bytes(b"k" * 32)
    settings: dict[str, Any] = {"kv_offload_dir": str(folder / "kv"), "kv_offload_memory": NUM_BLOCKS * 64}
    sides = [
        engine_side(
            BytePages(NUM_BLOCKS, on_host=on_host),
            shape,
            identity=EngineIdentity(name * 32, str(key_file)),
            num_blocks=NUM_BLOCKS,
        )
        for name in "ab"
    ]
    giver, port = _end(kind, sides[0], settings)
    taker = giver
    address = f"127.0.0.1:{port}"
    if port is not None:
        taker, _ = _end(kind, sides[1], {**settings, "kv_peers": address, "kv_offload_dir": str(folder / "other")})

    def legs(number: int) -> tuple[KvTransfer | None, KvTransfer | None]:
        if port is None:
            return None, None
        name = f"{number:032x}"
        return KvTransfer("prefill", name, "b" * 32), KvTransfer("decode", name, "a" * 32, address)

    try:
        yield Ends(giver, taker, legs, stores=port is None, num_requests=itertools.count(1))
    finally:
        for end in {id(giver): giver, id(taker): taker}.values():
            end.pages.gate.set()
            end.connector.close()
