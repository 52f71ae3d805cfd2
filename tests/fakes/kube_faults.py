"""What can go wrong between a client and the API server, chosen by method and path. No test in here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

REASONS: Mapping[int, str] = {
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(slots=True)
class Fault:
    """Befalls the next `times` requests that match, after `skip` that are let through.

    `hit` is set with the first; a request that hangs does so until `released`, and is then served.
    """

    status: int | None
    method: re.Pattern[str]
    path: re.Pattern[str]
    times: int
    skip: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    hit: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def reason(self) -> str:
        return REASONS.get(self.status or 0, "Unknown")

    def befalls(self, method: str, path: str) -> bool:
        """Whether it meets this request; counts it."""
        if self.times <= 0 or not self.method.fullmatch(method) or not self.path.search(path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        self.hit.set()
        return True


class Faults:
    """The faults of one server; the oldest that matches a request befalls it."""

    def __init__(self) -> None:
        self._planned: list[Fault] = []

    def answer(
        self,
        status: int,
        *,
        method: str = ".*",
        path: str = "",
        times: int = 1,
        skip: int = 0,
        retry_after_s: int | None = None,
    ) -> Fault:
        """Answer with an error instead of serving. `method` is a full regular expression, `path` is searched for."""
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        fault = Fault(status, re.compile(method), re.compile(path), times, skip, headers, "injected")
        self._planned.append(fault)
        return fault

    def hang(self, *, method: str = ".*", path: str = "", times: int = 1, skip: int = 0) -> Fault:
        """Keep requests waiting until the fault is released."""
        fault = Fault(None, re.compile(method), re.compile(path), times, skip)
        self._planned.append(fault)
        return fault

    def take(self, method: str, path: str) -> Fault | None:
        return next((fault for fault in self._planned if fault.befalls(method, path)), None)

    def clear(self) -> None:
        """Let everything through again, also what hangs."""
        for fault in self._planned:
            fault.released.set()
        self._planned.clear()
