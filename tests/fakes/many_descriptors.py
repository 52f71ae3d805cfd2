"""A process with so many descriptors open that further ones are beyond what `select.select` takes. No test in here."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

_FD_SETSIZE = 1024


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Have all that are opened within the block be from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = 4 * _FD_SETSIZE
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(room, hard)), hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while True:
            held.callback(os.close, opened := os.open(os.devnull, os.O_RDONLY))
            if opened >= _FD_SETSIZE:
                break
        yield
