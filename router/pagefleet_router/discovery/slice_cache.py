"""The EndpointSlices of one Service as the API server told of them: a list, then events. No network in here."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from pagefleet_router.discovery.endpoint_slices import EndpointSlice, SliceMetadata, faults_of
from pagefleet_router.discovery.slice_api import ApiServerError

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind")

_GONE = 410


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _SliceList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: tuple[msgspec.Raw, ...] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _BookmarkMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: _BookmarkMetadata


class _Named(msgspec.Struct, frozen=True):
    metadata: SliceMetadata


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    reason: str = ""


class SliceCache:
    """Slices by name. What cannot be read is skipped, and the log says so once for as long as it stays so."""

    def __init__(self) -> None:
        self.slices: dict[str, EndpointSlice] = {}
        self.version: str | None = None
        """What a watch goes on from; None: a list is needed."""
        self._faults: frozenset[str] = frozenset()

    def replace(self, answer: bytes) -> None:
        """Take over a list.

        Raises:
            ApiServerError: it is none.
        """
        try:
            listed = msgspec.json.decode(answer, type=_SliceList)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiServerError("the Kubernetes API server's answer is no list", relist=True) from error
        unread: list[str] = []
        slices = {}
        for item in listed.items or ():
            one = _read_slice(item, unread)
            if one is not None:
                slices[one.metadata.name] = one
        self.slices, self.version = slices, listed.metadata.resource_version
        self._tell(unread)

    def apply(self, line: bytes) -> None:
        """Take over one event of a watch.

        Raises:
            ApiServerError: the watch cannot go on from here.
        """
        try:
            event = msgspec.json.decode(line, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiServerError("the Kubernetes API server sent an event that is none", relist=True) from error
        if event.type == "ERROR":
            raise _failure(event.object)
        self._advance(event.object)
        unread: list[str] = []
        if event.type in ("ADDED", "MODIFIED"):
            one = _read_slice(event.object, unread)
            if one is not None:
                self.slices[one.metadata.name] = one
        elif event.type == "DELETED":
            named = _read(event.object, _Named)
            if named is not None:
                self.slices.pop(named.metadata.name, None)
        self._tell(unread)

    def _advance(self, raw: msgspec.Raw) -> None:
        seen = _read(raw, _Bookmark)
        if seen is not None and seen.metadata.resource_version:
            self.version = seen.metadata.resource_version

    def _tell(self, unread: list[str]) -> None:
        faults = frozenset((*unread, *faults_of(self.slices)))
        for fault in sorted(faults - self._faults):
            logger.warning("an EndpointSlice is not used: %s", fault)
        self._faults = faults


def _read_slice(raw: msgspec.Raw, unread: list[str]) -> EndpointSlice | None:
    try:
        return msgspec.json.decode(raw, type=EndpointSlice)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        named = _read(raw, _Named)
        unread.append(f"{named.metadata.name if named is not None else 'one without a name'}: {error}")
        return None


def _read(raw: msgspec.Raw, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _failure(raw: msgspec.Raw) -> ApiServerError:
    status = _read(raw, _Status) or _Status()
    if status.code == _GONE:
        return ApiServerError("the Kubernetes API server has forgotten what the watch goes on from", relist=True)
    return ApiServerError(f"the Kubernetes API server ends the watch with {status.code} {status.reason}", relist=True)
