"""`POST /start_profile` and `/stop_profile`, as in vLLM: a trace of the engine's steps in the folder that is set."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.ports import Profiler
from pagefleet_engine.server.responses import json_response


def made_profiler_dir(folder: str | None) -> str | None:
    """Return the absolute folder of profiles, which is made.

    Raises:
        ConfigError: it cannot be made.
    """
    if folder is None:
        return None
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"profiler_dir {path} cannot be made ({error.strerror}): give another folder") from None
    return str(path)


class ProfileRoutes:
    """Passes on what is asked for. `profiler` is None where there is no folder for profiles."""

    def __init__(self, profiler: Profiler | None) -> None:
        self._profiler = profiler

    async def start(self, request: Request) -> Response:
        """Answer when recording has begun."""
        await self._found().start_profile()
        return json_response(b"{}")

    async def stop(self, request: Request) -> Response:
        """Answer with the file's path when it is written."""
        return json_response(msgspec.json.encode({"path": await self._found().stop_profile()}))

    def _found(self) -> Profiler:
        if self._profiler is None:
            raise HttpRefusal(
                404, "This server records no profiles: start it with --profiler-dir FOLDER.", code="no_profiler"
            )
        return self._profiler
