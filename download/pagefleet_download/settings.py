"""How one download behaves. Tests give shorter times, and a clock and a disk of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagefleet_protocol.model_uri import ModelUri

from pagefleet_download.xet import WELL_KNOWN_HUB, XetLibrary

_ENDPOINTS = {
    "hf": ("HF_ENDPOINT",),
    "modelscope": ("MODELSCOPE_DOMAIN",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
_TOKENS = {"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")


Parts = Literal["all", "text", "small"]
"""Of a model. text: tokenizer, chat template and configurations, of what may be no model; small: all but weights, which
stay where they are."""


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
    offline: bool = False
    """Ask no hub: HF_HUB_OFFLINE is set."""
    parts: Parts = "all"
    xet: XetLibrary | None = None
    """Another way for large files of the well-known hub. A job in a cluster has none: its memory is counted."""
    web_identity: bool = False
    """The pod's account stands for a role at the store: requests are signed, whatever *_SKIP_SIGNATURE says."""
    parallel_files: int = 4
    patience: Patience = Patience()
    host: Host = Host()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody wants to have on this machine."""

    uri: ModelUri
    revision: str | None = None
    parts: Parts = "all"
    folder: Path | None = None
    """For what is downloaded, in place of the user's caches."""


def settings_for(
    uri: str, revision: str | None, endpoint: str | None, environment: Mapping[str, str]
) -> DownloadSettings:
    """Return the settings of one model; where nobody gave an endpoint, the store's own tools' variables are read."""
    variables = (environment.get(name) for name in _ENDPOINTS.get(uri.partition("://")[0], ()))
    endpoint = endpoint or next(filter(None, variables), None)
    token = environment.get(_TOKENS.get(uri.partition("://")[0], ""), "").strip()
    if not token and uri.startswith("hf://") and endpoint in (None, WELL_KNOWN_HUB):
        token = _stored_token(environment)
    return DownloadSettings(
        revision=revision,
        endpoint=endpoint,
        token=token or None,
        offline=any(environment.get(name, "").upper() in _TRUE for name in _OFFLINE),
        web_identity="AWS_WEB_IDENTITY_TOKEN_FILE" in environment,
    )


def hub_home(environment: Mapping[str, str]) -> Path:
    """The folder of the hub's tools: $HF_HOME, else below $XDG_CACHE_HOME, else below ~/.cache."""
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environment.get("HF_HOME") or f"{caches}/huggingface").expanduser()


def _stored_token(environment: Mapping[str, str]) -> str:
    """What `hf auth login` left, which is for the well-known hub alone; empty where there is nothing to read."""
    file = environment.get("HF_TOKEN_PATH")
    try:
        return (Path(file).expanduser() if file else hub_home(environment) / "token").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
