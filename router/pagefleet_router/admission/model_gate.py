"""The gate of one model: how many are in, who waits, and how fast the engines work."""

from __future__ import annotations

import math

from pagefleet_router.admission.room import Room
from pagefleet_router.admission.waiting_line import WaitingLine
from pagefleet_router.request_view import RequestView

RAMP_FIRST = 8
RAMP_DOUBLING_S = 1.0
"""The first engine after none gets RAMP_FIRST requests at once, and twice as many after each of these."""
FIRST_ANSWER_TOKENS = 128.0
"""Expected of an answer until some have been seen."""
_NEW_ANSWER_WEIGHT = 0.05


class ModelGate:
    """What the gate knows of one model.

    Args:
        queue_size: see `WaitingLine`.
        num_processes: that share the engines evenly.
    """

    __slots__ = (
        "_answer_tokens", "_num_processes", "_ramp_began_at", "_room", "is_letting_in", "line", "num_free", "num_in",
        "rate",
    )  # fmt: skip

    def __init__(self, queue_size: int, num_processes: int) -> None:
        self.line = WaitingLine(queue_size)
        self.rate = ServiceRate()
        self.num_in = 0
        """Requests that were let in and have not ended."""
        self.num_free = 0
        """How many more may go in; below zero while engines have lost room."""
        self.is_letting_in = False
        self._num_processes = num_processes
        self._room = Room()
        self._ramp_began_at: float | None = None
        self._answer_tokens = FIRST_ANSWER_TOKENS

    @property
    def has_engines(self) -> bool:
        """Whether any engine can take a request."""
        return self._room.num_engines > 0

    def take(self) -> None:
        """Let one in."""
        self.num_in += 1
        self.num_free -= 1

    def give_back(self) -> None:
        """Take back the place of one."""
        self.num_in -= 1
        self.num_free += 1

    def set_room(self, room: Room, now: float) -> bool:
        """Take over what the engines have room for; returns whether the first engine came while requests waited."""
        came_from_none = not self.has_engines and room.num_engines > 0 and self.line.num_waiting > 0
        self._room = room
        if came_from_none:
            self._ramp_began_at = now
        self.count_room(now)
        return came_from_none

    def count_room(self, now: float) -> None:
        """Work out `num_free`: an engine that comes to a crowd gets a few at first, then more."""
        share = self._room.share(self._num_processes)
        if self._ramp_began_at is not None:
            doublings = min(32.0, (now - self._ramp_began_at) / RAMP_DOUBLING_S)
            ramp = math.floor(RAMP_FIRST * self._room.num_engines * 2.0**doublings)
            if ramp >= share:
                self._ramp_began_at = None
            share = min(share, ramp)
        self.num_free = share - self.num_in

    def cost_of(self, view: RequestView) -> int:
        """Return the tokens that a request is expected to take."""
        answer = self._answer_tokens
        if view.max_tokens is not None:
            answer = min(answer, view.max_tokens)
        return max(1, view.num_tokens + round(answer))

    def learn(self, num_prompt_tokens: int, num_tokens: int, now: float) -> None:
        """Note what a request took in the end."""
        self.rate.add(num_tokens, now)
        num_answered = max(0, num_tokens - num_prompt_tokens)
        self._answer_tokens += _NEW_ANSWER_WEIGHT * (num_answered - self._answer_tokens)

    def seconds_ahead(self, priority: int, now: float) -> float:
        """Predict when a request of a priority that came now would be let in; 0 while no rate is known."""
        rate = self.rate.per_second(now)
        return self.line.cost_ahead(priority) / rate if rate > 0.0 else 0.0


WINDOW_S = 30


class ServiceRate:
    """Counts tokens by the second in which their request ended."""

    def __init__(self) -> None:
        self._tokens = [0] * WINDOW_S
        self._second = -1
        self._since: float | None = None

    def add(self, num_tokens: int, now: float) -> None:
        """Count a request's tokens; `now` in monotonic seconds."""
        second = int(now)
        if second != self._second:
            self._roll(second, now)
        self._tokens[self._second % WINDOW_S] += num_tokens

    def per_second(self, now: float) -> float:
        """Return the mean since the first request, at most over the window; 0 while nothing is known."""
        if self._since is None:
            return 0.0
        self._roll(int(now), now)
        return sum(self._tokens) / min(WINDOW_S, max(1.0, now - self._since))

    def _roll(self, second: int, now: float) -> None:
        if self._since is None:
            self._since = now
        for passed in range(min(WINDOW_S, second - self._second)):
            self._tokens[(second - passed) % WINDOW_S] = 0
        self._second = max(self._second, second)
