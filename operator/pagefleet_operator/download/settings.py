"""How one download behaves. Tests give shorter times, and a clock and a disk of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ENDPOINTS = {
    "hf": ("HF_ENDPOINT",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds, unless a name says otherwise."""

    stall: float = 60.0
    """A transfer without a byte for so long is tried again."""
    attempts: int = 6
    """In a row without progress, before the store counts as unreachable."""
    backoff_first: float = 1.0
    backoff_most: float = 30.0
    """Pause between attempts: doubles from the first to the most."""
    retry_after_most: float = 120.0
    """A store may ask for a longer pause, up to this."""
    lock_poll: float = 0.5
    """Between two looks whether another process is done with the folder."""


def free_bytes(folder: Path) -> int:
    """Space in the folder's file system that an ordinary user may fill."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True, slots=True)
class Host:
    """What the machine gives."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    free_bytes: Callable[[Path], int] = free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSettings:
    """Everything beside source and folder."""

    revision: str | None = None
    """Branch, tag or commit of a repository; default: its main branch."""
    endpoint: str | None = None
    """Base URL of a mirror of the hub, or of an S3 or GCS service; default: the well-known one."""
    token: str | None = field(default=None, repr=False)
    """Of the hub. The stores' libraries find their own credentials in the environment."""
    web_identity: bool = False
    """The pod's account stands for a role at the store: requests are signed, whatever *_SKIP_SIGNATURE says."""
    parallel_files: int = 4
    patience: Patience = Patience()
    host: Host = Host()


def settings_for(
    uri: str, revision: str | None, endpoint: str | None, environment: Mapping[str, str]
) -> DownloadSettings:
    """Return the settings of one model; where nobody gave an endpoint, the store's own tools' variables are read."""
    variables = (environment.get(name) for name in _ENDPOINTS.get(uri.partition("://")[0], ()))
    return DownloadSettings(
        revision=revision,
        endpoint=endpoint or next(filter(None, variables), None),
        token=environment.get("HF_TOKEN", "").strip() or None,
        web_identity="AWS_WEB_IDENTITY_TOKEN_FILE" in environment,
    )
