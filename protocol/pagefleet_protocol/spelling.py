"""What somebody may have meant who misspelt a word."""

from __future__ import annotations

from collections.abc import Iterable


def near_words(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known words that are close to `word`, the closest first; none where nothing is close.

    Case and the marks between words do not count.
    """
    import difflib  # noqa: PLC0415 - only a mistake pays for it

    by_folded = {_folded(candidate): candidate for candidate in known}
    return [by_folded[found] for found in difflib.get_close_matches(_folded(word), by_folded, n=most, cutoff=0.7)]


def _folded(word: str) -> str:
    return word.casefold().replace("_", "").replace("-", "")
