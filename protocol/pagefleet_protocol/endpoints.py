"""The endpoints file: which engines a router may send to.

`pagefleet up` (later: the operator) writes it, the router re-reads it when it changes. JSON, replaced atomically.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

FORMAT_VERSION = 1


class OnTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new revision that is tried out."""

    revision: str
    percent: Annotated[int, msgspec.Meta(ge=0, le=99)]
    """Share of the requests that its engines get together; the others share the rest."""


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine: a stable id, its base URL (`http://host:port`, no trailing slash) and the model name it serves."""

    id: str
    url: str
    model: str
    draining: bool = False
    """True: finish what runs there, send nothing new."""
    coming: bool = False
    """True: it is not ready for whoever lists it: send nothing, but look how far it is."""
    revision: str = ""
    """Hash of the settings that it was started with; empty: not told."""
    on_trial: OnTrial | None = None
    """The revision that it is of, where that is tried out; None: it is none that is tried out."""


class EndpointsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    endpoints: tuple[Endpoint, ...]
    version: int = FORMAT_VERSION


class EndpointsFileError(ValueError):
    """The file is not a valid endpoints file; the message says what is wrong."""


def decode_endpoints(data: bytes) -> EndpointsFile:
    """Parse the file's bytes.

    Raises:
        EndpointsFileError: not JSON, a missing or unknown field, another version, or an id used twice.
    """
    try:
        parsed = msgspec.json.decode(data, type=EndpointsFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EndpointsFileError(f"endpoints file: {error}") from error
    if parsed.version != FORMAT_VERSION:
        raise EndpointsFileError(f"endpoints file: version {parsed.version}, this router reads {FORMAT_VERSION}")
    ids = [endpoint.id for endpoint in parsed.endpoints]
    if len(set(ids)) != len(ids):
        raise EndpointsFileError("endpoints file: two endpoints have the same id")
    return parsed


def encode_endpoints(endpoints: tuple[Endpoint, ...]) -> bytes:
    """Return the file's bytes."""
    return msgspec.json.format(msgspec.json.encode(EndpointsFile(endpoints)), indent=2)
