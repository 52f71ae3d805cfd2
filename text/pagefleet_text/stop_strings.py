"""Finds stop strings in text that arrives in pieces, and holds back what may still become one.

Each stop string is followed by a Knuth-Morris-Pratt automaton: one step per character, whatever the strings look like,
and its state is the length of the text's tail that may still become the string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The watch over one output. The stop string that is complete first ends the text, the longest one of several.

    Args:
        stops: non-empty strings.
        include: keep the stop string itself in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        # Longest first, so that of several that end at the same character the one that starts earliest is reported.
        self._stops = [(stop, _borders(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._states = [0] * len(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; return what may be shown now, and the stop string if one is complete."""
        if not self._stops:
            return text, None
        held = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            if stop := self._advance(char):
                self._held = ""
                return held[: position if self._include else position - len(stop)], stop
        cut = len(held) - max(self._states)
        self._held = held[cut:]
        return held[:cut], None

    def finish(self) -> str:
        """Return what was held back, for a text that ended otherwise."""
        shown, self._held = self._held, ""
        return shown

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; return the stop string that it completes."""
        states = self._states
        for index, (stop, borders) in enumerate(self._stops):
            state = states[index]
            while state and stop[state] != char:
                state = borders[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                return stop
            states[index] = state
        return None


def _borders(stop: str) -> list[int]:
    """Return, for each matched length, the longest shorter match that the same characters also are."""
    borders = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length]
        if stop[length] == char:
            length += 1
        borders.append(length)
    return borders
