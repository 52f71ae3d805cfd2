"""Large files of the hub by its own way, Xet: parallel pieces, and none twice. huggingface_hub and hf-xet do it.

Xet asks addresses that the hub names, with a library that knows none of our guards: so only the well-known hub, over
TLS, is believed. Mirrors serve plain HTTP, and so does everyone where this fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from pagefleet_download.errors import said

WELL_KNOWN_HUB = "https://huggingface.co"
LARGE = 16 << 20
"""A smaller file is not worth another connection."""
_log = logging.getLogger(__name__)


class XetLibrary(Protocol):
    """Brings one file of the well-known hub to a path."""

    def fetch(self, url: str, path: Path, size: int, token: str | None, add_bytes: Callable[[int], None]) -> bool:
        """Return False where the hub has not stored the file so. Blocks; any exception: it did not work."""
        ...

    def abort(self) -> None:
        """Have `fetch` end soon, in whichever thread it runs."""
        ...


class HubXet:
    """By hf-xet, which huggingface_hub drives."""

    def fetch(self, url: str, path: Path, size: int, token: str | None, add_bytes: Callable[[int], None]) -> bool:
        from huggingface_hub.file_download import get_hf_file_metadata, xet_get  # noqa: PLC0415 - few need it

        metadata = get_hf_file_metadata(url, token=token or False, endpoint=WELL_KNOWN_HUB)
        if metadata.xet_file_data is None:
            return False
        xet_get(
            incomplete_path=path,
            xet_file_data=metadata.xet_file_data,
            headers={"authorization": f"Bearer {token}"} if token else {},
            expected_size=size,
            tqdm_class=_bar_class(add_bytes),
        )
        return True

    def abort(self) -> None:
        from huggingface_hub.utils._xet import abort_xet_session  # noqa: PLC0415

        abort_xet_session()  # type: ignore[no-untyped-call]


async def fetch_by_xet(
    library: XetLibrary, url: str, path: Path, size: int, token: str | None, add_bytes: Callable[[int], None]
) -> int | None:
    """Bring a file to `path`, whole but not verified. None: it has to be read over HTTP; nothing is left then.

    `add_bytes` is called in the event loop, with less than 0 for what came in vain; returned is what it was told.
    """
    loop = asyncio.get_running_loop()
    new = path.with_suffix(".xet")
    counted = 0

    def count(number: int) -> None:
        nonlocal counted
        counted += number
        add_bytes(number)

    def work() -> bool:
        return library.fetch(url, new, size, token, lambda number: _tell(loop, count, number))

    done = False
    try:
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            done = await asyncio.shield(working)
        except asyncio.CancelledError:
            with suppress(Exception):  # whatever the library says of it, this ends
                library.abort()
                await working
            raise
    except Exception as error:
        _log.warning("%s does not come by Xet (%s): it is read over HTTP", url.rpartition("/")[2], said(error))
    finally:
        if done:
            new.replace(path)
        else:
            new.unlink(missing_ok=True)
            count(-counted)
    return counted if done else None


def _tell(loop: asyncio.AbstractEventLoop, count: Callable[[int], None], number: int) -> None:
    loop.call_soon_threadsafe(count, number)


def _bar_class(add_bytes: Callable[[int], None]) -> type[Any]:
    """What looks to huggingface_hub like a class of progress bars: it tells what has come to the disk."""

    class Bar:
        total: float | None = None
        n = 0

        def __init__(self, *_: object, **options: Any) -> None:
            self.total = options.get("total")

        def update(self, number: float = 1) -> None:
            add_bytes(int(number))

        def update_transfer(self, _: float = 1) -> None:
            """Of bytes on the network, which are fewer."""

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

        def refresh(self, *_: object, **__: object) -> None: ...

        def close(self) -> None: ...

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

    return Bar
