"""The masks of a step, filled in a thread of their own while the device computes.

A step's masks can be filled once all tokens before it are known, which is when the step before it was taken in. They
are due before the next launch. Rows without a mask wait for them only as long as the device is at work on the step
anyhow: then the masked rows sit the step out, and what is filled for them is used by the next.

The masks of a step stand in one buffer, in the order of its rows, and the libraries fill it in place: where all come in
time, and nothing is special about any, the interpreter only names the rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from pagefleet_engine.core.in_flight import NOTHING_TO_MASK, ToMask
from pagefleet_engine.core.request import Request
from pagefleet_engine.core.step import StepMasks
from pagefleet_engine.core.thoughts import ThoughtFirst
from pagefleet_engine.grammars.port import GrammarSource, Mask, Matcher

GRACE_S = 0.001
"""That rows without a mask wait for those with one, beside the device's own work."""
MOST_S = 0.05
"""That a step waits for its masks in any case: requests come and go meanwhile, and then the rows compute again."""
LOOK_S = 0.0002
"""Between two looks at the device."""
MAX_FORCED = 64
"""Tokens of a stretch that is taken in one step."""
ROWS_PER_FORCED = 4
"""A row that computes several tokens costs all rows of its step, which are no longer alike: a stretch must be longer by
one token for each so many of them."""
_KEEPS_LOCK = 500
"""Under so many elements numpy keeps the interpreter's lock. To get it back from a step that is being launched costs
both threads more than to go by the rows one by one."""
_BITS = 32
_ALL = -1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Special:
    """What a row has beside its mask, or instead of it: one of these."""

    if_likeliest: Mask | None = None
    """See StepMasks."""
    forced: Sequence[int] = ()
    """The only tokens that can come next, one after another; at least two."""
    failure: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """Masks of requests, row by row."""

    requests: Sequence[Request]
    masks: Mask
    special: Mapping[int, Special]
    """By row."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What becomes of the masked rows of a step."""

    masks: StepMasks
    """Of those that are sampled."""
    unsampled: Sequence[tuple[Request, Special]] = ()
    """Forced, or failed."""
    late: Sequence[Request] = ()
    """Their masks are not there yet."""


class MaskFiller:
    """Begins and ends with the steps of one core.

    Attributes:
        seconds: that were spent filling, in all.
        is_quick: whether the last masks took less than GRACE_S.
    """

    def __init__(self, source: GrammarSource, vocab_size: int) -> None:
        self.seconds = 0.0
        self.is_quick = False
        self._source = source
        self._thread = ThreadPoolExecutor(1, "masks")
        self._due = NOTHING_TO_MASK
        self._filling: Future[_Filled] | None = None
        self._is_whole = False
        """Whether that is what the step asks for which is due, row by row."""
        self._kept: dict[Request, tuple[Mask, Special | None]] = {}
        """Rows that came too late for their step."""
        self._buffer = np.empty((0, -(-vocab_size // _BITS)), dtype=np.int32)

    def begin(self, due: ToMask, num_rows: int) -> None:
        """Begin to fill the masks of a step of `num_rows`, whose tokens before are all known."""
        self._due, self._is_whole = due, False
        if (filled := self._done()) is not None:
            self._keep(filled)
        if self._filling is not None or not due.rows:  # of rows that sat out: theirs come first
            return
        missing = due.requests
        if self._kept:
            self._kept = {request: self._kept[request] for request in due.requests if request in self._kept}
            missing = [request for request in due.requests if request not in self._kept]
        if missing:
            self._is_whole = not self._kept
            fewest = 2 + num_rows // ROWS_PER_FORCED
            self._filling = self._thread.submit(self._fill, missing, self._room(len(missing)), fewest)

    def take(self, may_wait: Callable[[], bool]) -> Taken:
        """Return what there is for the rows of the step; the masks hold until the next `begin`.

        `may_wait`: whether they may take longer; asked again and again.
        """
        due, self._due = self._due, NOTHING_TO_MASK
        began = time.monotonic()
        while self._filling is not None and not self._filling.done():
            if time.monotonic() - began >= (MOST_S if may_wait() else GRACE_S):
                break
            with suppress(TimeoutError):
                self._filling.result(LOOK_S)
        filled = self._done()
        if filled is not None and self._is_whole:
            return _taken(due.rows, filled)
        if filled is not None:
            self._keep(filled)
        return self._kept_for(due)

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._thread.shutdown(wait=True)

    def _done(self) -> _Filled | None:
        if self._filling is None or not self._filling.done():
            return None
        filling, self._filling = self._filling, None
        return filling.result()

    def _room(self, num_rows: int) -> Mask:
        """Return so many rows of the buffer, whose content was used or is kept elsewhere."""
        if len(self._buffer) < num_rows:
            self._buffer = np.empty((2 * num_rows, self._buffer.shape[1]), dtype=np.int32)
        return self._buffer[:num_rows]

    def _keep(self, filled: _Filled) -> None:
        for row, (request, mask) in enumerate(zip(filled.requests, filled.masks.copy(), strict=True)):
            self._kept[request] = (mask, filled.special.get(row))

    def _kept_for(self, due: ToMask) -> Taken:
        """What there is for a step whose rows were not asked for all at once."""
        there = [place for place, request in enumerate(due.requests) if request in self._kept]
        late = [request for request in due.requests if request not in self._kept]
        requests = [due.requests[place] for place in there]
        kept = [self._kept.pop(request) for request in requests]
        masks = np.array([mask for mask, _ in kept], dtype=np.int32).reshape(len(kept), self._buffer.shape[1])
        special = {row: special for row, (_, special) in enumerate(kept) if special is not None}
        return replace(_taken([due.rows[place] for place in there], _Filled(requests, masks, special)), late=late)

    def _fill(self, requests: Sequence[Request], masks: Mask, fewest: int) -> _Filled:
        """`fewest`: tokens of a stretch."""
        began = time.monotonic()
        special: dict[int, Special] = {}
        librarys: list[tuple[Matcher, int]] = []  # which fills its own at once
        for row, request in enumerate(requests):
            if (matcher := request.matcher) is not None and not isinstance(matcher, ThoughtFirst):
                librarys.append((matcher, row))
            elif (found := _fill_one(matcher, masks[row])) is not None:
                special[row] = found
        special |= self._fill_librarys(librarys, masks)
        for row in _of_one_word(masks):
            if row not in special and (found := _forced(requests[row], masks[row], fewest)) is not None:
                special[row] = found
        took = time.monotonic() - began
        self.is_quick = took < GRACE_S
        self.seconds += took
        return _Filled(requests, masks, special)

    def _fill_librarys(self, rows: Sequence[tuple[Matcher, int]], masks: Mask) -> dict[int, Special]:
        if not rows:
            return {}
        try:
            failures = self._source.fill(rows, masks)
        except Exception as error:  # whatever a library may raise, the other requests must go on
            _log.exception("the masks of %d rows could not be filled", len(rows))
            failures = {row: error for _, row in rows}
        return {row: Special(failure=error) for row, error in failures.items()}


def _of_one_word(masks: Mask) -> list[int]:
    """Rows whose bits are all in one word: those that may have one bit alone."""
    if masks.shape[1] < _KEEPS_LOCK:
        return [row for row, mask in enumerate(masks) if np.count_nonzero(mask) == 1]
    return np.flatnonzero(np.count_nonzero(masks, axis=1) == 1).tolist()


def _fill_one(matcher: ThoughtFirst | None, mask: Mask) -> Special | None:
    """`None`: the thought is over, and no form follows."""
    try:
        if matcher is None or not matcher.fill(mask):
            mask.fill(_ALL)
        opening = None if matcher is None else matcher.opens_with
    except Exception as error:  # whatever a library may raise
        return Special(failure=error)
    return None if opening is None else Special(opening)


def _forced(request: Request, mask: Mask, fewest: int) -> Special | None:
    try:
        tokens = stretch(request, mask, fewest)
    except Exception as error:  # whatever a library may raise
        return Special(failure=error)
    return Special(forced=tokens) if tokens else None


def _taken(rows: Sequence[int], filled: _Filled) -> Taken:
    """`rows`: places in the step."""
    special = filled.special
    if not special:
        return Taken(StepMasks(rows, filled.masks))
    unsampled = [(filled.requests[at], found) for at, found in special.items() if found.if_likeliest is None]
    likeliest = {at: found.if_likeliest for at, found in special.items() if found.if_likeliest is not None}
    sampled = [at for at in range(len(rows)) if at not in special or at in likeliest]
    masks, more = filled.masks[sampled], None
    if likeliest:
        none = np.zeros_like(masks[0])
        more = np.stack([likeliest.get(at, none) for at in sampled])
    return Taken(StepMasks([rows[at] for at in sampled], masks, more), unsampled)


def _may_force(request: Request) -> bool:
    """Whether a token that is the only one left by the form need not be sampled: nothing else bans or describes it."""
    p = request.sampling
    describes = p.logprobs is not None or p.prompt_logprobs is not None  # which a step tells that may be the last
    return not describes and p.allowed_token_ids is None and not p.bad_words_token_ids


def stretch(request: Request, mask: Mask, fewest: int = 2) -> Sequence[int]:
    """Tokens that come one after another because there is no other, at least `fewest` or none.

    `mask` is what may come next. The request's matcher is left where it was.

    Raises:
        Exception: the matcher's, which cannot be followed any more.
    """
    token = _only_token(mask) if _may_force(request) else None
    if token is None or request.matcher is None:
        return ()
    matcher, most = request.matcher, min(MAX_FORCED, request.ends_at - request.num_tokens)
    tokens: list[int] = []
    mask = np.empty_like(mask)
    while token is not None and len(tokens) < most and matcher.accept(token):
        tokens.append(token)
        if matcher.is_finished or token in request.ending_token_ids:
            break
        token = _only_token(mask) if matcher.fill(mask) else None
    matcher.rollback(len(tokens))
    return tokens if len(tokens) >= fewest else ()


def _only_token(mask: Mask) -> int | None:
    """The token whose bit alone is set."""
    (places,) = np.nonzero(mask)
    if len(places) != 1:
        return None
    word = int(mask[places[0]]) & 0xFFFFFFFF
    return int(places[0]) * _BITS + word.bit_length() - 1 if word & (word - 1) == 0 else None
