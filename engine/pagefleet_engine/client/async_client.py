"""The engine core as the server sees it: start, generate, abort, health. One per process, for one event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from pagefleet_kv.config import KvEventsConfig
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.client.core_process import CORE_COMMAND, CoreProcess
from pagefleet_engine.client.health import EngineHealth, judge
from pagefleet_engine.client.stream import OutputStream
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.stop import Stop
from pagefleet_engine.engine_core.admission import check_message
from pagefleet_engine.engine_core.messages import (
    AbortRequests,
    AddRequest,
    CoreStats,
    Drain,
    FromCore,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    StartFailed,
    StepOutputs,
)
from pagefleet_engine.engine_core.output_text import (
    NOTHING_ELSEWHERE,
    Chunk,
    Elsewhere,
    OutputSoFar,
    OutputText,
    spell_bad_words,
)
from pagefleet_engine.engine_core.progress import ProgressReader
from pagefleet_engine.engine_core.transport import BadMessage, ClientSocket, decode_from_core
from pagefleet_engine.errors import ConfigError, EngineDead, EngineError, ModelLoadError
from pagefleet_engine.sampling_params import SamplingParams

_SLICE_S = 0.002
_RESUMED_HERE = 1024
"""Tokens of another engine whose text is made on the event loop; that of more is made in a thread."""

_log = logging.getLogger(__name__)


class AsyncEngineClient:
    """A running engine core. Made by `start`; all methods belong to the event loop that called it.

    Attributes:
        ready: what the core said about the loaded model.
        stats: the core's latest figures; None before the first request.
        messages_dropped: bytes from the core's side that were no message.
    """

    def __init__(self, process: CoreProcess, tokenizer: Tokenizer, on_death: Callable[[], None] | None) -> None:
        self.stats: CoreStats | None = None
        self.messages_dropped = 0
        self._process = process
        self._tokenizer = tokenizer
        self._on_death = on_death
        self._socket = ClientSocket(f"ipc://{process.folder / 'core.sock'}")
        self._progress = ProgressReader(process.folder / "progress")
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None
        self._streams: dict[str, OutputStream] = {}
        self._serial = itertools.count()
        self._work_since: float | None = None
        self._death: EngineDead | None = None
        self._owes_nothing = asyncio.Event()
        self._owes_nothing.set()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer,
        on_death: Callable[[], None] | None = None,
        command: Sequence[str] = CORE_COMMAND,
        kv_events: KvEventsConfig | None = None,
        fleet_key_file: str | None = None,
    ) -> AsyncEngineClient:
        """Start a core and wait until it has loaded the model.

        Args:
            config: of the engine.
            tokenizer: the model's.
            on_death: called once, when the core ends without being asked to.
            command: of the core's process.
            kv_events: where the core publishes what its prefix cache gains and loses; None: nowhere.
            fleet_key_file: of the secret that the engines of its service share; None: it is of no fleet.

        Raises:
            ConfigError: a setting cannot work, in the core's words.
            ModelLoadError: the model cannot be loaded, in the core's words.
        """
        client = cls(CoreProcess(config, command, kv_events, fleet_key_file), tokenizer, on_death)
        try:
            client._process.start(client._core_ended)
            client._reader = asyncio.get_running_loop().create_task(client._read())
            client._reader.add_done_callback(client._reader_ended)
            await client._started
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def ready(self) -> Ready:
        """What the core said about the loaded model."""
        return self._started.result()

    @property
    def limits(self) -> ModelLimits:
        """What a request is checked against."""
        return ModelLimits(self.ready.max_model_len, self.ready.vocab_size)

    @property
    def incarnation(self) -> str:
        """Name of this start of the core: 32 hexadecimal digits."""
        return self._process.incarnation

    @property
    def core_pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        elsewhere: Elsewhere = NOTHING_ELSEWHERE,
    ) -> AsyncGenerator[Chunk, None]:
        """Run one request for one output (see `fan_out` for more). Closing the generator early aborts it.

        A slow reader gets fewer, larger chunks. Of the output of `elsewhere` they have only what the caller lacks.

        Raises:
            InvalidRequest: with the first chunk: a field is wrong.
            QueueFull: with the first chunk: too much is waiting.
            KVLoadFailed: with the first chunk: the prompt's K/V did not come from the prefill engine.
            RequestFailed: the core gave the request up.
            EngineDead: the core is gone.
        """
        sampling = spell_bad_words(sampling, self._tokenizer)
        message = AddRequest(
            request_id,
            list(prompt_token_ids),
            sampling,
            self._tokenizer.eos_token_ids,
            priority,
            cache_salt,
            transfer=elsewhere.transfer,
        )
        text, rest = OutputText(self._tokenizer, sampling), None
        resumed = elsewhere.output
        if resumed is None:
            check_message(message, self.limits)
        else:
            message = msgspec.structs.replace(message, resumed_token_ids=resumed.token_ids)
            rest = await _resume(text, resumed, check_message(message, self.limits))
        if rest is not None:
            yield rest
            if rest.finish_reason is not None:
                return
        # Ours are unique, so that a late output of an aborted request cannot reach a new one of the same name.
        own_id = f"{request_id[:200]}#{next(self._serial)}"
        stream = self._open(own_id, message, text)
        try:
            while True:
                chunk = await stream.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._forget(own_id)

    def health(self) -> EngineHealth:
        """Return the state now, without waiting or asking the core."""
        return judge(self._progress.read(), self._death is None, self._work_since, time.monotonic())

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self._socket.send(ResetPrefixCache())

    def drain(self) -> None:
        """Take nothing on for other engines any more. Requests go on."""
        if self._death is None:
            self._socket.send(Drain())

    async def transfers_over(self) -> None:
        """Return when no K/V of requests that have ended is on its way to other engines; or the core is gone."""
        await self._owes_nothing.wait()

    async def close(self) -> None:
        """End the core and every open request."""
        if self._death is None:
            self._death = EngineDead("The engine was shut down.")
            self._fail_all()
        self._process.stop()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        if self._started.done() and not self._started.cancelled():
            self._started.exception()  # seen, whoever waited for it
        self._started.cancel()
        self._socket.close()

    def _open(self, own_id: str, message: AddRequest, text: OutputText) -> OutputStream:
        if self._death is not None:
            raise EngineDead(*self._death.args)
        stream = self._streams[own_id] = OutputStream(text)
        if self._work_since is None:
            self._work_since = time.monotonic()
        self._socket.send(msgspec.structs.replace(message, request_id=own_id))
        return stream

    def _forget(self, own_id: str) -> None:
        """Drop a stream whose reader is gone; what the core still computes for it is aborted."""
        stream = self._streams.pop(own_id, None)
        if stream is not None and not stream.ended and self._death is None:
            self._socket.send(AbortRequests([own_id]))
        self._note_work()

    def _note_work(self) -> None:
        if not self._streams:
            self._work_since = None

    async def _read(self) -> None:
        while True:
            data = await self._socket.receive()
            try:
                message = decode_from_core(data)
            except BadMessage as error:
                self.messages_dropped += 1
                _log.warning("dropped a message of %d bytes from the engine core: %s", len(data), error.reason)
                continue
            await self._take(message)

    async def _take(self, message: FromCore) -> None:
        match message:
            case StepOutputs():
                self.stats = message.stats
                (self._owes_nothing.clear if message.stats.transfers_owed else self._owes_nothing.set)()
                await self._deliver_all(message.outputs)
            case Ready():
                if not self._started.done():
                    self._started.set_result(message)
            case StartFailed():
                self._refuse_start((ConfigError if message.by_setting else ModelLoadError)(message.message))

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
        stream.ended = output.finish_reason is not None
        try:
            chunk = stream.text.push(output)
        except EngineError as error:
            stream.fail(error)
            return
        if chunk is None:
            return
        stream.put(chunk)
        if chunk.finish_reason is not None:
            self._forget(output.request_id)  # aborts what a stop string ended early, before its reader wakes up

    def _refuse_start(self, error: EngineError) -> None:
        if not self._started.done():
            self._started.set_exception(error)

    def _core_ended(self) -> None:
        """The process is gone: end every open request now."""
        if self._death is not None:
            return
        status = self._process.exit_status()
        if not self._started.done():
            # Its last words may still be in the socket; they say more than a status.
            asyncio.get_running_loop().call_later(
                0.5,
                self._refuse_start,
                ModelLoadError(f"the engine core {status} while it loaded the model: see the log"),
            )
            return
        self._die(f"the engine core (pid {self.core_pid}) {status}")

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """Nobody delivers any more: the engine is as good as dead, and must not look alive."""
        if reader.cancelled() or self._death is not None:
            return
        _log.error("reading from the engine core failed", exc_info=reader.exception())
        self._refuse_start(ModelLoadError("the engine core could not be understood: see the log"))
        self._die("the client of the engine core failed")

    def _die(self, why: str) -> None:
        _log.error("%s with %d open requests", why, len(self._streams))
        self._death = EngineDead("The engine stopped unexpectedly.")
        self._fail_all()
        if self._on_death is not None:
            self._on_death()

    def _fail_all(self) -> None:
        for stream in self._streams.values():
            stream.ended = True
            stream.fail(EngineDead(*self._death.args if self._death else ()))
        self._streams.clear()
        self._owes_nothing.set()
        self._note_work()


async def _resume(text: OutputText, resumed: OutputSoFar, ended: Stop | None) -> Chunk | None:
    if len(resumed.token_ids) <= _RESUMED_HERE:
        return text.resume(resumed, ended)
    return await asyncio.to_thread(text.resume, resumed, ended)
