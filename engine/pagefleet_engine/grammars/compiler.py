"""Compiles forms apart from the step loop, and remembers them: in memory, and in a folder that replicas share."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakSet, ref

import msgspec
from pagefleet_kv.bell import Bell
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from pagefleet_engine.errors import EngineError, GrammarFailed, InvalidRequest, QueueFull
from pagefleet_engine.grammars.backends import BackendChoice, backends_for, make_backend, version_of
from pagefleet_engine.grammars.compile_process import CompileProcess, TooCostly
from pagefleet_engine.grammars.disk_cache import DiskCache
from pagefleet_engine.grammars.port import MAX_FILL_S, Grammar, GrammarBackend, Mask, Matcher
from pagefleet_engine.grammars.vocabulary import Vocabulary, VocabularyFiles

_FORMAT = 1
"""Of what is compiled: another number lets go of all that is on disk."""
_LARGE = 64 * 1024
"""Bytes of a compiled form that may take longer than milliseconds to load."""
_RETRY_S = 5.0
_MAX_REFUSED = 1024
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What compiling may take, and what is remembered of it."""

    seconds: float = 10.0
    """Of one form."""
    memory: int = 2 * 2**30
    """Bytes of one form, while it is compiled."""
    compiled_bytes: int = 64 * 2**20
    """Of one form's result."""
    waiting: int = 256
    """Forms that wait to be compiled. A tenant may have as many of them as there is room left: alone half."""
    cached_bytes: int = 512 * 2**20
    """Of results in memory."""
    disk_bytes: int = 2 * 2**30
    """Of results on disk."""


class _Ticket(Generic[Result]):
    """See `Ticket`."""

    def __init__(self) -> None:
        self._outcome: Result | Exception | None = None

    def done(self) -> bool:
        return self._outcome is not None

    def result(self) -> Result:
        assert self._outcome is not None, "asked before it is done"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def settle(self, outcome: Result | Exception) -> None:
        self._outcome = outcome


class _Compiled(NamedTuple):
    """What is to be loaded."""

    backend: str
    data: bytes
    how: str
    """Where it comes from, as it is counted."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Job:
    """Held by the compiler while somebody waits for it; lines only refer to it."""

    key: bytes
    params: StructuredOutputsParams
    tenants: set[str] = field(default_factory=set)
    """In whose turns it is done: the first that comes."""
    tickets: WeakSet[_Ticket[Grammar]] = field(default_factory=WeakSet)
    """Of those that still wait: who drops his ticket has left."""
    compiled: _Compiled | None = None


class GrammarCompiler:
    """One per engine; nothing of it starts before the first form is submitted. `submit` may be called by one thread.

    Three threads: one looks on disk and loads, one waits for the process that compiles, one loads what is large. So a
    known form waits for none that is not known, and none for the loading of another that is large. All take the
    tenants' forms in turns.

    Args:
        files: of the model's vocabulary.
        choice: of the backend.
        folder: of the cache on disk; None: nothing is kept.
        limits: of everything.
        num_threads: that fill masks; default: as many as this process may use.
    """

    def __init__(
        self,
        files: VocabularyFiles,
        choice: BackendChoice,
        folder: Path | None,
        limits: GrammarLimits | None = None,
        num_threads: int | None = None,
    ) -> None:
        self._files = files
        self._choice = choice
        self._limits = limits or GrammarLimits()
        self._num_threads = num_threads
        self._disk = None if folder is None else DiskCache(folder, self._limits.disk_bytes)
        self._process = CompileProcess(files, self._limits.seconds, self._limits.memory)
        self._bell = Bell()
        self._lock = threading.Lock()
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()
        self._grammar_bytes = 0
        self._refused: OrderedDict[bytes, InvalidRequest] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_digest: bytes | None = None
        self._backends: dict[str, GrammarBackend] = {}
        self._backend_lock = threading.Lock()
        self._suspects: WeakSet[Matcher] = WeakSet()
        self._lookups = _Line("grammar-lookups")
        self._compiles = _Line("grammar-compiles")
        self._loads = _Line("grammar-loads")
        self._is_closed = False
        self._compile_seconds = 0.0
        self._counts = {"memory": 0, "disk": 0, "compiled": 0, "refused": 0, "failed": 0}

    @property
    def bell(self) -> int:
        """A file descriptor; see `GrammarSource`."""
        return self._bell.fileno()

    def silence(self) -> None:
        """Stop the bell."""
        self._bell.silence()

    def submit(self, params: StructuredOutputsParams, tenant: str = "") -> _Ticket[Grammar]:
        """Begin to compile a form; see `GrammarSource`.

        Raises:
            QueueFull: too many wait.
        """
        key = hashlib.sha256(msgspec.msgpack.encode(params)).digest()
        ticket: _Ticket[Grammar] = _Ticket()
        with self._lock:
            if (known := self._grammars.get(key)) is not None:
                self._grammars.move_to_end(key)
                self._counts["memory"] += 1
                ticket.settle(known)
            elif (refused := self._refused.get(key)) is not None:
                self._counts["refused"] += 1
                ticket.settle(_again(refused))
            else:
                if (job := self._jobs.get(key)) is None:
                    self._check_room(tenant)
                    self._jobs[key] = job = _Job(key, params)
                job.tickets.add(ticket)
                if tenant not in job.tenants:  # it need not wait for another tenant's turn
                    job.tenants.add(tenant)
                    self._lookups.put(tenant, partial(self._attempt, self._look_up, ref(job), tenant))
        return ticket

    def _check_room(self, tenant: str) -> None:
        """Raise QueueFull where the tenant has as many forms waiting as others may still bring."""
        self._jobs = {key: job for key, job in self._jobs.items() if job.tickets}  # nobody waits for the rest
        own = sum(tenant in job.tenants for job in self._jobs.values())
        if own >= self._limits.waiting - len(self._jobs):
            message = f"{len(self._jobs)} forms of answers wait to be compiled, {own} of them yours: try again later."
            raise QueueFull(message, _RETRY_S)

    def spell(self) -> _Ticket[Vocabulary]:
        """Begin to read the vocabulary; see `GrammarSource`."""
        ticket: _Ticket[Vocabulary] = _Ticket()
        if self._vocabulary is None:
            self._compiles.put("", partial(self._spell, ticket))
        else:
            ticket.settle(self._vocabulary)
        return ticket

    def fill(self, rows: Sequence[tuple[Matcher, int]], masks: Mask) -> dict[int, Exception]:
        """Fill rows in parallel; see `GrammarSource`."""
        failures: dict[int, Exception] = {}
        if self._suspects:
            failures = _fill_alone([each for each in rows if each[0] in self._suspects], masks)
            unsuspected = [each for each in rows if each[0] not in self._suspects]
            self._suspects.difference_update([matcher for matcher, _ in rows])
            rows = unsuspected
        backends = {matcher.backend for matcher, _ in rows}
        for backend in backends:
            own = rows if len(backends) == 1 else [each for each in rows if each[0].backend is backend]
            failures |= self._fill_together(backend, own, masks)
        return failures

    def _fill_together(
        self, backend: GrammarBackend, rows: Sequence[tuple[Matcher, int]], masks: Mask
    ) -> dict[int, Exception]:
        """Where that takes long, or fails, each row is filled alone: next time, or at once."""
        began = time.monotonic()
        try:
            backend.fill(rows, masks)
        except Exception:  # whatever a library may raise
            return _fill_alone(rows, masks)
        if time.monotonic() - began > MAX_FILL_S:
            self._suspects.update(matcher for matcher, _ in rows)
        return {row: failure for matcher, row in rows if (failure := matcher.failure) is not None}

    def stats(self) -> dict[str, float]:
        """Return counters and gauges."""
        with self._lock:
            counts = {f"grammars_{name}_total": float(count) for name, count in self._counts.items()}
            return {
                **counts,
                "grammars_compile_seconds_total": self._compile_seconds,
                "grammars_waiting": float(len(self._jobs)),
                "grammars_cached_bytes": float(self._grammar_bytes),
            }

    def close(self) -> None:
        """End the threads and the process. Tickets that are not done stay so."""
        self._is_closed = True
        self._process.kill()
        self._lookups.close()
        self._compiles.close()
        self._loads.close()
        self._process.kill()
        self._bell.close()

    # --- in the threads ---

    def _attempt(self, work: Callable[[_Job, str], None], waiting: ref[_Job], tenant: str) -> None:
        """Whatever happens, the job's tickets are settled. Where nobody waits any more, nothing is done."""
        job = waiting()
        with self._lock:
            if job is None or self._is_closed or self._jobs.get(job.key) is not job:
                return
            if not job.tickets:
                del self._jobs[job.key]
                return
        try:
            work(job, tenant)
        except InvalidRequest as error:
            self._settle(job, error, "refused")
        except Exception as error:
            if not isinstance(error, EngineError):
                _log.exception("a grammar could not be compiled")
            failure = error if isinstance(error, GrammarFailed) else GrammarFailed("The form could not be compiled.")
            self._settle(job, failure, "failed")

    def _look_up(self, job: _Job, tenant: str) -> None:
        """Load what is on disk; hand the rest on."""
        if job.compiled is None and self._disk is not None and (vocabulary := self._known_vocabulary()) is not None:
            for name in backends_for(job.params, self._choice):
                data = self._disk.load(self._disk_key(job, name, vocabulary))
                if data is not None:
                    job.compiled = _Compiled(name, data, "disk")
                    break
        if job.compiled is None:
            self._compiles.put(tenant, partial(self._attempt, self._compile, ref(job), tenant))
        else:
            self._load(job, tenant)

    def _compile(self, job: _Job, tenant: str) -> None:
        if job.compiled is None:
            job.compiled = self._compiled(job)
        self._load(job, tenant)

    def _load(self, job: _Job, tenant: str) -> None:
        """Load what is compiled, now or in a thread of its own where that may take long."""
        compiled = job.compiled  # another tenant's turn may take it back
        if compiled is not None and len(compiled.data) > _LARGE:
            self._loads.put(tenant, partial(self._attempt, self._load_now, ref(job), tenant))
        else:
            self._load_now(job, tenant)

    def _load_now(self, job: _Job, tenant: str) -> None:
        compiled, vocabulary = job.compiled, self._known_vocabulary()
        if compiled is None:  # in another tenant's turn it was of no use
            return
        assert vocabulary is not None, "nothing is compiled without it"
        try:
            self._settle(job, self._backend(compiled.backend, vocabulary).load(compiled.data), compiled.how)
        except ValueError as error:
            if compiled.how != "disk":
                raise
            _log.warning("a grammar on disk is of no use (%s): compiling again", error)
            job.compiled = None
            self._compiles.put(tenant, partial(self._attempt, self._compile, ref(job), tenant))

    def _compiled(self, job: _Job) -> _Compiled:
        vocabulary = self._known_vocabulary() or self._read_vocabulary()
        first: InvalidRequest | None = None
        for name in backends_for(job.params, self._choice):
            try:
                began = time.monotonic()
                data = self._process.compile(name, job.params)
                self._compile_seconds += time.monotonic() - began
            except InvalidRequest as error:
                if first is None or isinstance(error, TooCostly):  # another time it might be held
                    first = error
                continue
            if len(data) > self._limits.compiled_bytes:
                path = f"structured_outputs.{job.params.form}"
                raise InvalidRequest(f"Invalid '{path}': compiled it is too large. Make it simpler.", path)
            if self._disk is not None:
                self._disk.store(self._disk_key(job, name, vocabulary), data)
            return _Compiled(name, data, "compiled")
        assert first is not None, "there is one backend at least"
        raise first

    def _spell(self, ticket: _Ticket[Vocabulary]) -> None:
        if self._is_closed:
            return
        try:
            ticket.settle(self._known_vocabulary() or self._read_vocabulary())
        except Exception as error:  # as above
            _log.warning("the vocabulary could not be read: %s", error)
            ticket.settle(GrammarFailed("The model's vocabulary could not be read."))
        self._bell.ring()

    def _known_vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary if it was read before, by this process or by another."""
        if self._vocabulary is None and self._disk is not None:
            data = self._disk.load(self._files.digest())
            if data is not None:
                self._vocabulary = msgspec.msgpack.decode(data, type=Vocabulary)
        return self._vocabulary

    def _disk_key(self, job: _Job, name: str, vocabulary: Vocabulary) -> bytes:
        versions = f"grammar {_FORMAT} {name} {version_of(name)}".encode()
        return hashlib.sha256(versions + b"\0" + self._digest_of(vocabulary) + job.key).digest()

    def _digest_of(self, vocabulary: Vocabulary) -> bytes:
        if self._vocabulary_digest is None:
            self._vocabulary_digest = vocabulary.digest()
        return self._vocabulary_digest

    def _read_vocabulary(self) -> Vocabulary:
        vocabulary = self._process.vocabulary()
        if self._disk is not None:
            self._disk.store(self._files.digest(), msgspec.msgpack.encode(vocabulary))
        self._vocabulary = vocabulary
        return vocabulary

    def _backend(self, name: str, vocabulary: Vocabulary) -> GrammarBackend:
        with self._backend_lock:
            if name not in self._backends:
                self._backends[name] = make_backend(name, vocabulary, self._num_threads)
            return self._backends[name]

    def _settle(self, job: _Job, outcome: Grammar | Exception, how: str) -> None:
        with self._lock:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            self._counts[how] += 1
            if isinstance(outcome, TooCostly):
                pass  # on a machine that is less busy it may be compiled
            elif isinstance(outcome, InvalidRequest):
                self._refused[job.key] = _again(outcome)
                if len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
            elif not isinstance(outcome, Exception):
                self._keep(job.key, outcome)
            for ticket in job.tickets:
                ticket.settle(outcome)
        self._bell.ring()

    def _keep(self, key: bytes, grammar: Grammar) -> None:
        if key in self._grammars:  # two tenants waited for it, and both threads had a turn
            return
        self._grammars[key] = grammar
        self._grammar_bytes += grammar.num_bytes
        while self._grammar_bytes > self._limits.cached_bytes and len(self._grammars) > 1:
            self._grammar_bytes -= self._grammars.popitem(last=False)[1].num_bytes


class _Line:
    """A thread that does one job after another, of each tenant in turn; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        """Of the tenants that have some, in the order of their turns."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, tenant: str, job: Callable[[], None]) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.setdefault(tenant, deque()).append(job)
            self._changed.notify()

    def close(self) -> None:
        """End it after the job that it is at."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if self._is_closed:
                return None
            tenant, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[tenant] = jobs
            return job


def _fill_alone(rows: Sequence[tuple[Matcher, int]], masks: Mask) -> dict[int, Exception]:
    """Each then measures itself."""
    failures: dict[int, Exception] = {}
    for matcher, row in rows:
        try:
            matcher.fill(masks[row])
        except Exception as error:  # whatever a library may raise
            failures[row] = error
    return failures


def _again(error: InvalidRequest) -> InvalidRequest:
    """Return an equal error: one that was raised keeps hold of where that was."""
    return InvalidRequest(error.message, error.param, error.code)
