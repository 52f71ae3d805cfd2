"""What each process of the router knows alone, and all of it together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from pagefleet_protocol.console_state import MAX_NOTES, AdmissionState, FaultState, PairState, RequestState


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's share of the document."""

    admission: tuple[AdmissionState, ...]
    pairs: tuple[PairState, ...]
    faults: tuple[FaultState, ...]
    requests: tuple[RequestState, ...]


def encode_part(part: Part) -> bytes:
    return msgspec.msgpack.encode(part)


def decode_parts(texts: Iterable[bytes]) -> Iterator[Part]:
    """Yield the parts that can be read: a worker that is about to be replaced may be of another version."""
    for text in texts:
        try:
            yield msgspec.msgpack.decode(text, type=Part)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def merge_parts(parts: Sequence[Part]) -> Part:
    """Return the workers' parts as one: counts and rates are added up, lists put in order, newest first."""
    if len(parts) == 1:
        return parts[0]
    lines: dict[str, AdmissionState] = {}
    pairs: dict[tuple[str, str], PairState] = {}
    faults: dict[tuple[str, str | None], FaultState] = {}
    for part in parts:
        for line in part.admission:
            lines[line.tenant] = _added(lines[line.tenant], line) if line.tenant in lines else line
        for pair in part.pairs:
            key = pair.source, pair.target
            pairs[key] = _flowing(pairs[key], pair) if key in pairs else pair
        for fault in part.faults:
            name = fault.what, fault.engine
            faults[name] = _again(faults[name], fault) if name in faults else fault
    return Part(
        admission=tuple(lines[tenant] for tenant in sorted(lines)),
        pairs=tuple(pairs[key] for key in sorted(pairs)),
        faults=tuple(sorted(faults.values(), key=lambda one: one.at, reverse=True)[:MAX_NOTES]),
        requests=tuple(sorted((one for part in parts for one in part.requests), key=lambda one: one.at, reverse=True)),
    )


def _added(one: AdmissionState, other: AdmissionState) -> AdmissionState:
    return AdmissionState(
        tenant=one.tenant,
        running=one.running + other.running,
        waiting=one.waiting + other.waiting,
        refused=one.refused + other.refused,
    )


def _flowing(one: PairState, other: PairState) -> PairState:
    return PairState(
        source=one.source,
        target=one.target,
        transfers=one.transfers + other.transfers,
        transfers_s=one.transfers_s + other.transfers_s,
        bytes_s=one.bytes_s + other.bytes_s,
    )


def _again(one: FaultState, other: FaultState) -> FaultState:
    newer = one if one.at >= other.at else other
    return msgspec.structs.replace(newer, count=one.count + other.count)
