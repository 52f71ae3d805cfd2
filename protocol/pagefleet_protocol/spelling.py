"""What somebody may have meant who misspelt a word."""

from __future__ import annotations

from collections.abc import Iterable


def near_words(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known words that are close to `word`, the closest first; none where nothing is close.

    Case and the marks between words do not count. Two swapped letters of a short word are close, two words that begin
    alike are not: `--max-loras` is no `--max-logprobs`.
    """
    import difflib  # noqa: PLC0415 - only a mistake pays for it

    by_folded = {_folded(candidate): candidate for candidate in known}
    folded = _folded(word)
    found = difflib.get_close_matches(folded, by_folded, n=most, cutoff=0.7)
    return [by_folded[one] for one in found if _is_near(difflib.SequenceMatcher(a=folded, b=one).ratio(), folded, one)]


def _is_near(ratio: float, word: str, other: str) -> bool:
    return ratio >= 0.8 or sorted(word) == sorted(other)


def _folded(word: str) -> str:
    return word.casefold().replace("_", "").replace("-", "")
