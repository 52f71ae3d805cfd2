"""A pool of pages, requests, and one connector between them, as a scheduler would use it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from pagefleet_engine.core.request import Request
from pagefleet_kv.port import BlockRun, KVConnector, LoadDone, TransfersDone
from pagefleet_protocol.block_hash import PrefixScope, extend_hashes
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.bells import rings
from tests.fakes.byte_pages import PATIENCE_S, SHAPE, BytePages


def make_request(tokens: Sequence[int], request_id: str = "r", salt: str | None = None) -> Request:
    """A request with its full blocks hashed."""
    request = Request(request_id, tokens, SamplingParams(), (), PrefixScope("m", salt=salt))
    extend_hashes(request.block_hashes, request.prefix_root, request.token_ids, SHAPE.block_size)
    return request


class ConnectorScene:
    """Puts into each block what its hash says, saves it, loads it into other blocks, and compares."""

    def __init__(self, connector: KVConnector, pages: BytePages) -> None:
        self.connector = connector
        self.pages = pages
        self.saved: list[int] = []
        """Saves that have ended."""
        self.loaded: dict[str, LoadDone] = {}
        """Loads that have ended."""
        self._blocks = itertools.count()

    def prompt(self, num_blocks: int, start: int = 0) -> list[int]:
        """Tokens of so many full blocks and one token."""
        return list(range(start, start + num_blocks * SHAPE.block_size + 1))

    def take(self, count: int) -> list[int]:
        """Numbers of blocks that were not used yet."""
        return [next(self._blocks) for _ in range(count)]

    def content(self, request: Request, index: int, group: int = 0) -> bytes:
        """What a block of a request must hold."""
        digest = request.block_hashes[index] + bytes([group])
        return (digest * (self.pages.bytes_per_block // len(digest) + 1))[: self.pages.bytes_per_block]

    def compute(self, request: Request, first: int = 0, stop: int | None = None, group: int = 0) -> BlockRun:
        """Fill blocks as a step would."""
        hashes = request.block_hashes[first:stop]
        blocks = self.take(len(hashes))
        for index, block in enumerate(blocks, first):
            self.pages.poke(block, self.content(request, index, group))
        return BlockRun(first, blocks, hashes, group)

    def save(self, request: Request, first: int = 0, stop: int | None = None) -> int | None:
        """Compute blocks and offer them; returns what the connector says."""
        return self.connector.save(request, [self.compute(request, first, stop)])

    def save_and_wait(self, request: Request, first: int = 0, stop: int | None = None) -> None:
        """As `save`, until they need not be kept any more."""
        number = self.save(request, first, stop)
        if number is not None:
            self.wait_for(lambda: number in self.saved)

    def loadable(self, request: Request, num_cached_tokens: int = 0) -> int:
        """Ask until there is an answer."""
        answers: list[int] = []

        def answered() -> bool:
            answer = self.connector.loadable(request, num_cached_tokens)
            if answer is not None:
                answers.append(answer)
            return bool(answers)

        self.wait_for(answered)
        return answers[-1]

    def load(self, request: Request, num_blocks: int, first: int = 0) -> BlockRun:
        """Begin a load into new blocks."""
        hashes = request.block_hashes[first : first + num_blocks]
        run = BlockRun(first, self.take(len(hashes)), hashes)
        self.connector.load(request, [run])
        return run

    def load_and_wait(self, request: Request, num_blocks: int, first: int = 0) -> int:
        """As `load`, until it has ended; checks what came and returns how many blocks that were."""
        self.loaded.pop(request.request_id, None)
        run = self.load(request, num_blocks, first)
        self.wait_for(lambda: request.request_id in self.loaded)
        done = self.loaded[request.request_id]
        self.check(request, run, done.num_blocks)
        return done.num_blocks

    def check(self, request: Request, run: BlockRun, num_blocks: int) -> None:
        """The first blocks of a run hold what they should."""
        for index, block in enumerate(run.blocks[:num_blocks], run.first):
            assert self.pages.peek(block) == self.content(request, index, run.group), f"block {index} is wrong"

    def settle(self) -> TransfersDone:
        """Take what has ended."""
        done = self.connector.finished()
        self.saved += done.saves
        for load in done.loads:
            assert load.request_id not in self.loaded, "a load ends once"
            self.loaded[load.request_id] = load
        return done

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Settle, whenever the bell rings, until the condition holds."""
        self.settle()
        while not condition():
            bell = self.connector.bell
            assert bell is not None
            assert rings([bell], PATIENCE_S), "the bell does not ring"
            self.settle()
