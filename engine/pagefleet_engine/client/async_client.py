"""The engine as the server sees it: start, generate, abort, health. One per process, for one event loop.

Behind it is one core, or one for each data rank: each has the whole model and a cache of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial

from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.load_progress import LoadProgress
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.client.api_seat import ALONE, ApiSeat
from pagefleet_engine.client.balance import Balance, Seat
from pagefleet_engine.client.beam_search import beam_answers
from pagefleet_engine.client.core_ahead import CORE_COMMAND
from pagefleet_engine.client.core_link import CoreLink
from pagefleet_engine.client.core_process import CoreAtHand, CoreProcess, RunningCore, Surroundings
from pagefleet_engine.client.data_ranks import core_processes, joint_ready, joint_stats, rank_rooms
from pagefleet_engine.client.shared_notebook import SharedNotebook
from pagefleet_engine.client.stream import Chunks, Generation, Mailbox, OutputStream
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.engine_core.admission import check_resumed
from pagefleet_engine.engine_core.messages import (
    AbortRequests,
    AddRequest,
    AskerGone,
    CoreStats,
    Drain,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    StartProfile,
    StopProfile,
)
from pagefleet_engine.engine_core.output_text import Chunk, OutputSoFar, OutputText
from pagefleet_engine.engine_core.progress import EngineHealth
from pagefleet_engine.errors import EngineDead, EngineError, InvalidRequest, ModelLoadError

_SLICE_S = 0.002
_ID_CHARS = 200
_RESUMED_HERE = 1024
"""Tokens of another engine whose text is made on the event loop; that of more is made in a thread."""

_log = logging.getLogger(__name__)


class AsyncEngineClient:
    """Engine cores, which run after `load`. All methods belong to the event loop that made it.

    A prompt and all of its outputs are one core's. Where one core ends, the engine does: who starts it anew gets all of
    it, and nobody sees an engine that is half there.

    Args:
        processes: of the cores, one for each data rank.
        tokenizer: the model's.
        on_death: called once, when a core ends without being asked to.
        seat: of this API process.

    Attributes:
        notebook: what all API processes note, once the cores have loaded; None where there is one.
    """

    def __init__(
        self,
        processes: Sequence[CoreProcess | CoreAtHand],
        tokenizer: Tokenizer,
        on_death: Callable[[], None] | None,
        seat: ApiSeat = ALONE,
    ) -> None:
        self._config = processes[0].config
        self._tokenizer = tokenizer
        self._on_death = on_death
        self._seat = seat
        self._cores = [
            CoreLink(process, self._deliver_all, partial(self._core_died, rank), seat.index)
            for rank, process in enumerate(processes)
        ]
        self._balance = Balance([])
        self.notebook: SharedNotebook | None = None
        self._streams: dict[str, OutputStream] = {}
        self._serial = itertools.count()
        self._death: EngineDead | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer,
        on_death: Callable[[], None] | None = None,
        command: Sequence[str] = CORE_COMMAND,
        around: Surroundings | None = None,
    ) -> AsyncEngineClient:
        """Start the cores and wait until they have loaded the model.

        Args:
            config: of the engine.
            tokenizer: the model's.
            on_death: called once, when a core ends without being asked to.
            command: of a core's process.
            around: the cores.

        Raises:
            ConfigError, ModelLoadError: see `load`.
        """
        client = cls(core_processes(config, command, around), tokenizer, on_death)
        await client.load()
        return client

    async def load(self) -> None:
        """Start the cores and wait until all have loaded the model, which `loading` follows; closed if one fails.

        Raises:
            ConfigError: a setting cannot work, in the core's words.
            ModelLoadError: the model cannot be loaded, in the core's words.
        """
        try:
            ready = await asyncio.gather(*(core.load() for core in self._cores))
        except BaseException:
            await self.close()
            raise
        self._share_ranks(ready)

    def join(self, ready: Sequence[Ready]) -> None:
        """Take part in cores that have loaded the model, as these said of themselves."""
        for core, said in zip(self._cores, ready, strict=True):
            core.join(said)
        self._share_ranks(ready)

    def _share_ranks(self, ready: Sequence[Ready]) -> None:
        rooms, caching = rank_rooms(self._config, ready), self._config.cache.enable_prefix_caching
        self.notebook = self._seat.notebook(rooms)
        self._balance = Balance(rooms, prefix_caching=caching, notebook=self.notebook)

    def loading(self) -> Sequence[LoadProgress]:
        """Return how far the loading of each core is, without waiting or asking one."""
        return [core.loading for core in self._cores]

    @property
    def ready(self) -> Ready:
        """What the cores said about the loaded model."""
        return joint_ready([core.ready for core in self._cores])

    @property
    def stats(self) -> CoreStats | None:
        """The latest figures of all cores together; None before the first request."""
        return joint_stats(self.rank_stats, [core.ready.num_blocks for core in self._cores])

    @property
    def rank_stats(self) -> list[CoreStats | None]:
        """The latest figures of each core; None before its first request."""
        return [core.stats for core in self._cores]

    @property
    def limits(self) -> ModelLimits:
        """What a request is checked against."""
        ready = self.ready
        return ModelLimits(ready.max_model_len, ready.vocab_size, self._config.model.max_logprobs)

    @property
    def incarnation(self) -> str:
        """Name of this start of the engine: 32 hexadecimal digits."""
        return self._cores[0].process.incarnation

    @property
    def incarnations(self) -> Sequence[str]:
        """The same of each core: its K/V is known by it."""
        return [core.process.incarnation for core in self._cores]

    @property
    def running_cores(self) -> list[RunningCore]:
        """The cores, as other API processes are told of them."""
        return [
            RunningCore(str(core.process.folder), core.process.pid, core.process.incarnation, core.ready)
            for core in self._cores
        ]

    def asker_gone(self, asker: int, start: int) -> None:
        """Abort what an API process asked for whose start with this number has ended, and forget what it noted."""
        if self.notebook is not None:
            self.notebook.clear(asker)
        for core in self._cores:
            core.send(AskerGone(asker, start))

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the cores."""
        return [core.process.pid for core in self._cores]

    async def generate(self, asked: Generation) -> Chunks:
        """Run the choices of a request. Closing the generator early aborts what still runs.

        A slow reader gets fewer, larger chunks. Of output that it goes on from they have only what the caller lacks.

        Raises:
            InvalidRequest: with the first chunk: a field is wrong.
            QueueFull: with the first chunk: too much is waiting.
            KVLoadFailed: with the first chunk: the prompt's K/V did not come from the prefill engine.
            RequestFailed: the core gave a choice up.
            EngineDead: a core is gone.
        """
        if asked.beams is not None:
            async with aclosing(beam_answers(self.generate, asked, asked.beams, self._tokenizer)) as answers:
                async for answer in answers:
                    yield answer
            return
        mailbox, open_ids = Mailbox(), list[str]()
        # Ids are ours, and unique, so that a late output of an aborted request cannot reach a new one of the same name.
        ids = (f"{asked.request_id[:_ID_CHARS]}#{self._seat.mark}{serial}" for serial in self._serial)
        try:
            ranks: dict[int, int] = {}
            if asked.transfer is not None and asked.transfer.told:  # other engines know this core's K/V, not another's
                ranks[0] = self.incarnations.index(asked.transfer.told)
            for message, index, so_far in asked.messages(ids, self._tokenizer.eos_token_ids):
                if index:  # to send one copies a whole prompt: other requests must not wait for all of a thousand
                    await asyncio.sleep(0)
                text = OutputText(self._tokenizer, message.sampling)
                if so_far is not None and await self._resume(message, text, so_far, mailbox, index):
                    continue
                open_ids += message.output_ids
                prompt = index // asked.sampling.n
                ranks[prompt] = self._open(message, index, mailbox, text, ranks.get(prompt))
            num_open = asked.num_choices
            while num_open:
                index, chunk = await mailbox.get()
                num_open -= chunk.finish_reason is not None
                yield index, chunk
        finally:
            self._forget(open_ids)

    async def _resume(
        self, message: AddRequest, text: OutputText, so_far: OutputSoFar, mailbox: Mailbox, index: int
    ) -> bool:
        """Take in another engine's output, and deliver what the caller lacks of it; returns whether that is its end."""
        ended = check_resumed(message, self.limits)
        if len(so_far.token_ids) <= _RESUMED_HERE:
            rest = text.resume(so_far, ended)
        else:
            rest = await asyncio.to_thread(text.resume, so_far, ended)
        if rest is None:
            return False
        mailbox.put(index, rest)
        return rest.finish_reason is not None

    def health(self) -> EngineHealth:
        """Return the state now, that of the core which is worst off, without waiting or asking one."""
        cores = [core.health() for core in self._cores]
        alive = self._death is None and all(core.alive for core in cores)
        return EngineHealth(alive, max(core.stalled_s for core in cores))

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self._balance.forget_prefixes()
        for core in self._cores:
            core.send(ResetPrefixCache())

    async def start_profile(self) -> None:
        """Record the core's steps from now on; the configuration refuses profiles of several.

        Raises:
            ProfileRefused: it records already, or has no folder for it.
            EngineDead: the core is gone.
        """
        await self._cores[0].ask_profile(StartProfile())

    async def stop_profile(self) -> str:
        """Return the path of the profile when it is written; the core does nothing else meanwhile.

        Raises:
            ProfileRefused: none was recorded, or it cannot be written.
            EngineDead: the core is gone.
        """
        return await self._cores[0].ask_profile(StopProfile())

    def drain(self) -> None:
        """Take nothing on for other engines any more. Requests go on."""
        for core in self._cores:
            core.send(Drain())

    async def transfers_over(self) -> None:
        """Return when no K/V of requests that have ended is on its way to other engines; or a core is gone."""
        for core in self._cores:
            await core.owes_nothing.wait()

    def abort(self, request_id: str) -> None:
        """End what is open of a request, each choice with the reason `abort`: its generator comes to its end."""
        own = [one for one in self._streams if one.rpartition("#")[0] == request_id[:_ID_CHARS]]
        for stream in [self._streams[one] for one in own]:
            stream.mailbox.put(stream.index, Chunk("", (), finish_reason="abort"))
        self._forget(own)

    def end(self) -> None:
        """End the cores and every open request, at once."""
        if self._death is None:
            self._death = EngineDead("The engine was shut down.")
            self._fail_all()
        for core in self._cores:
            core.end()

    async def close(self) -> None:
        """End the cores and every open request; returns when nothing of them is left."""
        self.end()
        await asyncio.gather(*(core.close() for core in self._cores))

    def _open(self, message: AddRequest, first: int, mailbox: Mailbox, text: OutputText, rank: int | None) -> int:
        """Send a prompt; its choices are `first`, whose text is `text`, and those after it.

        Returns the rank that gets it: the given one, if any.
        """
        if self._death is not None:
            raise EngineDead(*self._death.args)
        scope = PrefixScope("", message.adapter, message.cache_salt)
        seat = self._balance.place(message.prompt_token_ids, message.sampling.n, scope, rank)
        core, output_ids = self._cores[seat.rank], message.output_ids
        for index, output_id in enumerate(output_ids, first):
            own_text = text if index == first else OutputText(self._tokenizer, message.sampling)
            self._streams[output_id] = OutputStream(mailbox, index, own_text, seat)
        core.count_open(len(output_ids))
        core.send(message)
        return seat.rank

    def _forget(self, output_ids: Sequence[str]) -> None:
        """Drop streams whose reader is gone; what the cores still compute for them is aborted."""
        still_open: dict[int, list[str]] = {}
        for output_id in output_ids:
            if output_id in self._streams:
                still_open.setdefault(self._remove(output_id).rank, []).append(output_id)
        for rank, own in still_open.items():
            self._cores[rank].send(AbortRequests(own))

    def _remove(self, output_id: str) -> Seat:
        """Drop an open stream; returns the seat that its output had."""
        seat = self._streams.pop(output_id).seat
        seat.leave()
        self._cores[seat.rank].count_open(-1)
        return seat

    async def _deliver_all(self, outputs: Sequence[RequestOutput]) -> None:
        """Deliver a step's outputs, letting others run now and then."""
        until = time.monotonic() + _SLICE_S
        for output in outputs:
            self._deliver(output)
            if time.monotonic() > until:
                await asyncio.sleep(0)
                until = time.monotonic() + _SLICE_S

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        over = output.finish_reason is not None
        stream.seat.has_begun()
        if over:
            self._remove(output.request_id)
        try:
            chunk = stream.text.push(output)
        except (EngineError, InvalidRequest) as error:
            stream.fail(error)
            return
        if chunk is None:
            return
        stream.mailbox.put(stream.index, chunk)
        if chunk.finish_reason is not None and not over:
            self._forget([output.request_id])  # a stop string ended it early: aborted before its reader wakes up

    def _core_died(self, rank: int, why: str) -> None:
        """End what is open, and the other cores."""
        whose = "" if len(self._cores) == 1 else f" of data rank {rank}"
        _log.error("%s%s with %d open requests", why, whose, len(self._streams))
        self._death = EngineDead("The engine stopped unexpectedly.")
        self._fail_all()
        for core in self._cores:
            core.refuse_start(ModelLoadError(f"{why}{whose} while others loaded the model: see the log"))
        if self._on_death is not None:
            self._on_death()

    def _fail_all(self) -> None:
        for output_id, stream in list(self._streams.items()):
            stream.fail(EngineDead(*self._death.args if self._death else ()))
            self._remove(output_id)
