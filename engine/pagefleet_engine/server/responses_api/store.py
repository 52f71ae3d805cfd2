"""Keeps responses in a file: bounded in bytes and age, by tenant, found again after a restart.

An engine opens the first store of its folder that no other engine holds, so that engines on one machine never share one
and a restarted engine finds its own again. A store has a name, which the ids of its responses begin with: by that a
router knows which engine to ask.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

logger = logging.getLogger(__name__)

_MAX_STORES = 256
_SCHEMA = """
CREATE TABLE IF NOT EXISTS store (name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, previous TEXT, is_running INTEGER NOT NULL, used_at REAL NOT NULL,
    bytes INTEGER NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL, events BLOB, PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used_at);
CREATE INDEX IF NOT EXISTS by_tenant ON responses (tenant, used_at);
"""
_READ = "SELECT previous, is_running, response, items FROM responses WHERE tenant = ? AND id = ? AND used_at > ?"
_ECHO = 16
"""Bytes of a response that count as one: most of them repeat its request, and only its output is kept."""


class _Answer(msgspec.Struct):
    output: list[dict[str, Any]]


class StoredTooLong(Exception):
    """What a request refers to has more bytes than one request may bring back."""


class Allowance:
    """Bytes of stored responses that one request may bring back."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        """Count bytes.

        Raises:
            StoredTooLong: they are too many.
        """
        self._left -= num_bytes
        if self._left < 0:
            raise StoredTooLong

    def inflate(self, blob: bytes, weight: int = 1) -> bytes:
        """Return what was compressed, of which `weight` bytes count as one; hardly more than is left is made.

        Raises:
            StoredTooLong: it is too long.
        """
        text = zlib.decompressobj().decompress(blob, weight * self._left + 1)
        self.take(-(-len(text) // weight))
        return text


@dataclass(frozen=True, slots=True)
class PastTurn:
    """What a later request can refer to of a response."""

    previous: str | None
    is_running: bool
    items: list[dict[str, Any]]
    """Its own input."""
    output: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store may hold."""

    num_bytes: int
    age_s: float
    """Since a response was last used: made, fetched, or gone on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response."""

    id: str
    previous: str | None = None
    """The response that it goes on from."""
    is_running: bool = False
    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Its own input."""
    events: bytes | None = None
    """As they were streamed; None where they cannot be streamed again."""


class ResponseStore:
    """One store, for one thread at a time.

    Args:
        database: of `open_store`.
        lock: held as long as the store is open; None: it is in memory.
        limits: what it may hold.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        database: sqlite3.Connection,
        lock: IO[bytes] | None,
        limits: StoreLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._lock = lock
        self._limits = limits
        self._clock = clock
        database.row_factory = sqlite3.Row
        with database:
            database.executescript(_SCHEMA)
            found = database.execute("SELECT name FROM store").fetchone()
            self.name: str = secrets.token_hex(6) if found is None else found[0]
            """12 hexadecimal digits, the same as long as the file lives."""
            if found is None:
                database.execute("INSERT INTO store VALUES (?)", (self.name,))
        rows = database.execute("SELECT tenant, SUM(bytes) FROM responses GROUP BY tenant").fetchall()
        self._held: Counter[str] = Counter(dict(rows))
        """Tenant -> bytes of its responses, as of the last commit."""
        self.num_responses: int = database.execute("SELECT COUNT(*) FROM responses").fetchone()[0]
        self.num_evicted = {"age": 0, "room": 0}
        """Responses that had to go, by why."""

    @property
    def num_bytes(self) -> int:
        """That the responses take."""
        return self._held.total()

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response, in place of one with its id that ran; one that is complete stays as it is.

        Where there is no room the least recently used ones of the tenant go that has most.
        """
        blobs = [
            zlib.compress(msgspec.json.encode(stored.response), 1),
            zlib.compress(msgspec.json.encode(stored.items), 1),
            None if stored.events is None else zlib.compress(stored.events, 1),
        ]
        size = sum(len(blob) for blob in blobs if blob is not None)
        with self._database as database:
            query = "SELECT is_running FROM responses WHERE tenant = ? AND id = ?"
            found = database.execute(query, (tenant, stored.id)).fetchone()
            if found is not None and not found["is_running"]:
                return
            held = self._held.copy()
            held[tenant] += size - (self._remove(tenant, stored.id) or 0)
            row = (tenant, stored.id, stored.previous, stored.is_running, self._clock(), size, *blobs)
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            num_old, num_more = self._make_room(held)
        self._held = +held
        self.num_responses += (found is None) - num_old - num_more
        self.num_evicted["age"] += num_old
        self.num_evicted["room"] += num_more

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of the tenant, if there is one."""
        found = self._database.execute(
            "SELECT * FROM responses WHERE tenant = ? AND id = ? AND used_at > ?",
            (tenant, response_id, self._clock() - self._limits.age_s),
        ).fetchone()
        if found is None:
            return None
        self._touch(tenant, [response_id])
        return _stored(found)

    def turn(self, tenant: str, response_id: str, allowance: Allowance) -> PastTurn | None:
        """Return what a response of the tenant adds to a conversation, if there is one.

        Raises:
            StoredTooLong: it has more bytes than are left of the allowance.
        """
        found = self._turn(tenant, response_id, allowance)
        if found is not None:
            self._touch(tenant, [response_id])
        return found

    def chain(self, tenant: str, response_id: str, allowance: Allowance) -> list[PastTurn]:
        """Return a response and all that it goes on from, the oldest first.

        Empty where one of them is gone, or goes on from itself.

        Raises:
            StoredTooLong: they have more bytes than are left of the allowance.
        """
        chain: dict[str, PastTurn] = {}
        following: str | None = response_id
        while following is not None:
            found = None if following in chain else self._turn(tenant, following, allowance)
            if found is None:
                return []
            chain[following] = found
            following = found.previous
        self._touch(tenant, list(chain))
        return list(chain.values())[::-1]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; returns whether there was one."""
        with self._database:
            num_bytes = self._remove(tenant, response_id)
        self._held[tenant] -= num_bytes or 0
        self.num_responses -= num_bytes is not None
        return num_bytes is not None

    def running(self) -> list[tuple[str, StoredResponse]]:
        """Return the responses that are said to run, with their tenants: after a start, those that were cut off."""
        rows = self._database.execute("SELECT * FROM responses WHERE is_running").fetchall()
        return [(row["tenant"], _stored(row)) for row in rows]

    def close(self) -> None:
        """Let another engine have the store."""
        self._database.close()
        if self._lock is not None:
            self._lock.close()

    def _turn(self, tenant: str, response_id: str, allowance: Allowance) -> PastTurn | None:
        oldest = self._clock() - self._limits.age_s
        row = self._database.execute(_READ, (tenant, response_id, oldest)).fetchone()
        if row is None:
            return None
        items = msgspec.json.decode(allowance.inflate(row["items"]))
        answer = msgspec.json.decode(allowance.inflate(row["response"], _ECHO), type=_Answer)
        return PastTurn(row["previous"], bool(row["is_running"]), items, answer.output)

    def _touch(self, tenant: str, ids: list[str]) -> None:
        """Note that responses were used: a full disk takes no note, and they are read all the same."""
        now = self._clock()
        rows = [(now, tenant, one) for one in ids]
        try:
            with self._database as database:
                database.executemany("UPDATE responses SET used_at = ? WHERE tenant = ? AND id = ?", rows)
        except sqlite3.Error as error:
            logger.warning("the use of %d responses cannot be noted: %s", len(ids), error)

    def _remove(self, tenant: str, response_id: str) -> int | None:
        """Return the bytes that are free now; None: there is no such response."""
        query = "DELETE FROM responses WHERE tenant = ? AND id = ? RETURNING bytes"
        found = self._database.execute(query, (tenant, response_id)).fetchone()
        return None if found is None else found["bytes"]

    def _make_room(self, held: Counter[str]) -> tuple[int, int]:
        """Remove what is too old, and what is too much: return how many; `held` becomes what is left."""
        query = "DELETE FROM responses WHERE used_at <= ? AND NOT is_running RETURNING tenant, bytes"
        old = self._database.execute(query, (self._clock() - self._limits.age_s,)).fetchall()
        for row in old:
            held[row["tenant"]] -= row["bytes"]
        num_more = 0
        oldest = "SELECT id FROM responses WHERE tenant = ? AND NOT is_running ORDER BY used_at LIMIT 1"
        full: set[str] = set()  # of responses that run
        while held.total() > self._limits.num_bytes and len(full) < len(held):
            tenant = max(held.keys() - full, key=held.__getitem__)
            found = self._database.execute(oldest, (tenant,)).fetchone()
            if found is None:
                full.add(tenant)
            else:
                held[tenant] -= self._remove(tenant, found["id"]) or 0
                num_more += 1
        return len(old), num_more


def _stored(row: sqlite3.Row) -> StoredResponse:
    return StoredResponse(
        id=row["id"],
        previous=row["previous"],
        is_running=bool(row["is_running"]),
        response=msgspec.json.decode(zlib.decompress(row["response"])),
        items=msgspec.json.decode(zlib.decompress(row["items"])),
        events=None if row["events"] is None else zlib.decompress(row["events"]),
    )


def open_store(folder: Path, limits: StoreLimits) -> ResponseStore:
    """Open the first store of a folder that nobody holds, or make one.

    Where the folder cannot be used responses are kept in memory, and the log says so. A file that is no store any more
    is put aside.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MAX_STORES):
            lock = _try_lock(folder / f"{number}.lock")
            if lock is not None:
                return _open_file(folder / f"{number}.sqlite3", lock, limits)
        reason = f"{_MAX_STORES} engines hold its stores"
    except (OSError, sqlite3.Error) as error:
        reason = str(error)
    logger.warning("responses are kept in memory and lost with this process: %s cannot be used (%s)", folder, reason)
    return ResponseStore(sqlite3.connect(":memory:", check_same_thread=False), None, limits)


def _try_lock(path: Path) -> IO[bytes] | None:
    lock = path.open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError:
        lock.close()
        raise
    return lock


def _open_file(path: Path, lock: IO[bytes], limits: StoreLimits) -> ResponseStore:
    for _ in range(2):
        database = sqlite3.connect(path, check_same_thread=False)
        try:
            path.chmod(0o600)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            return ResponseStore(database, lock, limits)
        except sqlite3.DatabaseError as error:
            database.close()
            if isinstance(error, sqlite3.OperationalError):
                raise
            logger.warning("%s is no store of responses any more (%s): it is put aside", path, error)
            path.replace(path.with_suffix(".broken"))
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).unlink()
    raise sqlite3.OperationalError(f"{path} cannot be made anew")
