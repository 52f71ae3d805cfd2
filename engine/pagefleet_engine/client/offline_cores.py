"""Cores in processes of their own, driven as the one in the caller's process is: by `add`, `step` and `abort`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from pagefleet_protocol.block_hash import PrefixScope

from pagefleet_engine.client.balance import Balance, Seat
from pagefleet_engine.client.core_ahead import CORE_COMMAND
from pagefleet_engine.client.core_link import CoreLink
from pagefleet_engine.client.data_ranks import core_processes, joint_ready, joint_stats, rank_rooms
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.engine_core.messages import (
    AbortRequests,
    AddRequest,
    CoreStats,
    Drain,
    Ready,
    RequestOutput,
    ResetPrefixCache,
)
from pagefleet_engine.errors import EngineDead, ModelLoadError

_Value = TypeVar("_Value")


class OfflineCores:
    """The data ranks of an `LLMEngine`, which run after the constructor. Not thread-safe.

    An event loop in a thread of its own reads what they send, so that it does not matter whether the caller has one.

    Args:
        config: of the engine.
        command: of a core's process.

    Raises:
        ConfigError, ModelLoadError: as `CoreLink.load` does.

    Attributes:
        ready: what the cores said about the loaded model.
        limits: what a request is checked against.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] = CORE_COMMAND) -> None:
        self._cores: list[CoreLink] = []
        self._seats: dict[str, Seat] = {}
        """By the id of an open output."""
        self._outputs: deque[RequestOutput] = deque()
        """Taken by the caller's thread, so that none is lost on the way to one that is interrupted."""
        self._death: EngineDead | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine cores", daemon=True)
        self._thread.start()
        try:
            ready = self._run(self._load(config, command))
        except BaseException:
            self.shutdown()
            raise
        self.ready: Ready = joint_ready(ready)
        self.limits = ModelLimits(self.ready.max_model_len, self.ready.vocab_size, config.model.max_logprobs)
        self._balance: Balance = Balance(rank_rooms(config, ready), prefix_caching=config.cache.enable_prefix_caching)

    def add(self, message: AddRequest) -> list[RequestOutput]:
        """Send a prompt to the rank where it costs least; a refusal comes with a step. Returns nothing."""
        scope = PrefixScope("", message.adapter, message.cache_salt)
        self._call(self._add, message, scope)
        return []

    def abort(self, request_ids: Sequence[str]) -> None:
        """End outputs; nothing more is told of them."""
        self._call(self._abort, list(request_ids))

    def step(self) -> list[RequestOutput]:
        """Wait until an open output has something to tell; returns what there is.

        Raises:
            EngineDead: a core is gone.
        """
        self._run(self._wait())
        outputs: list[RequestOutput] = []
        while self._outputs:
            outputs.append(self._outputs.popleft())
        if not outputs and self._death is not None:
            raise EngineDead(*self._death.args)
        return outputs

    def stats(self) -> CoreStats:
        """Return the latest figures of all cores together."""
        blocks = [core.ready.num_blocks for core in self._cores]
        return joint_stats([core.stats for core in self._cores], blocks) or CoreStats(0, 0, 0.0, 0, 0, 0, 0)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self._balance.forget_prefixes()
        for core in self._cores:
            self._call(core.send, ResetPrefixCache())

    def shutdown(self, within_s: float = 0.0) -> None:
        """End the cores; those before `within_s` seconds are over only whose K/V is where it should be."""
        if not self._thread.is_alive():
            return
        if threading.current_thread() is self._thread:  # which collected the engine, as nobody held it any more
            for core in self._cores:
                core.end()
            self._loop.stop()
            return
        self._run(self._end(within_s))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        """Have the loop do some work; whoever is interrupted meanwhile leaves none of it behind."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        async def call() -> None:
            function(*arguments)

        self._run(call())

    async def _load(self, config: EngineConfig, command: Sequence[str]) -> list[Ready]:
        self._news = asyncio.Event()
        self._cores = [
            CoreLink(process, self._take, partial(self._die, rank))
            for rank, process in enumerate(core_processes(config, command))
        ]
        return await asyncio.gather(*(core.load() for core in self._cores))

    def _add(self, message: AddRequest, scope: PrefixScope) -> None:
        if self._death is not None:
            raise EngineDead(*self._death.args)
        seat = self._balance.place(message.prompt_token_ids, message.sampling.n, scope)
        self._seats.update(dict.fromkeys(message.output_ids, seat))
        self._cores[seat.rank].send(message)

    def _abort(self, request_ids: Sequence[str]) -> None:
        still_open: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (seat := self._seats.pop(request_id, None)) is not None:
                seat.leave()
                still_open.setdefault(seat.rank, []).append(request_id)
        for rank, own in still_open.items():
            self._cores[rank].send(AbortRequests(own))

    async def _wait(self) -> None:
        while self._seats and not self._outputs and self._death is None:
            self._news.clear()
            await self._news.wait()

    async def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            seat = self._seats.get(output.request_id)
            if seat is None:
                continue  # it was aborted
            seat.has_begun()
            if output.finish_reason is not None:
                del self._seats[output.request_id]
                seat.leave()
            self._outputs.append(output)
        self._news.set()

    def _die(self, rank: int, why: str) -> None:
        self._death = EngineDead(f"The engine stopped unexpectedly: {why} of data rank {rank}.")
        for core in self._cores:
            core.refuse_start(ModelLoadError(f"{why} of data rank {rank} while others loaded the model: see the log"))
        self._news.set()

    async def _end(self, within_s: float) -> None:
        if within_s:
            for core in self._cores:
                core.send(Drain())
            waits = (core.owes_nothing.wait() for core in self._cores)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*waits), within_s)
        await asyncio.gather(*(core.close() for core in self._cores))
