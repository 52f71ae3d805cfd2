"""Who a request is for: a line of a key file, `KEY [tenant=NAME] [weight=W] [rpm=N] [tpm=N] [priority=N]`.

A bare key is a tenant of its own, called by the key's hash.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

MAX_PRIORITY = 100
_LINE = re.compile(r"(?P<key>\S.*?)(?P<attributes>(?:\s+[a-z]+=\S*)*)")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WEIGHT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_COUNT = re.compile(r"[0-9]{1,12}")
_PRIORITY = re.compile(r"-?[0-9]{1,3}")
_ATTRIBUTES = ("tenant", "weight", "rpm", "tpm", "priority")


class KeyLineError(ValueError):
    """A line is wrong; the message says how, and holds nothing of the key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose requests share one queue, one share of the engines and one set of limits."""

    name: str
    weight: float = 1.0
    """Its share of tokens while others wait too, relative to theirs."""
    rpm: int | None = None
    """Requests per minute; None: no limit."""
    tpm: int | None = None
    """Tokens per minute, of prompts and answers; None: no limit."""
    max_priority: int = 0
    """Highest priority that its requests may ask for, -100 to 100."""


def read_key_line(line: str) -> tuple[bytes, Tenant]:
    """Return a line's key and whose it is.

    Args:
        line: without space around it.

    Raises:
        KeyLineError: an attribute is unknown, given twice, or its value is wrong.
    """
    found = _LINE.fullmatch(line)
    assert found is not None
    key = found["key"].encode()
    given: dict[str, str] = {}
    for word in found["attributes"].split():
        name, _, value = word.partition("=")
        if name not in _ATTRIBUTES:
            raise KeyLineError(f"{name[:32]}= is no attribute: give {'=, '.join(_ATTRIBUTES)}=")
        if name in given:
            raise KeyLineError(f"{name}= is given twice")
        given[name] = value
    name = given.get("tenant", f"key-{hashlib.sha256(key).hexdigest()[:16]}")
    if not _NAME.fullmatch(name):
        raise KeyLineError("tenant= is no name: give up to 64 letters, digits, '.', '_' and '-'")
    return key, Tenant(name, _weight(given), _limit(given, "rpm"), _limit(given, "tpm"), _priority(given))


def _weight(given: dict[str, str]) -> float:
    text = given.get("weight", "1")
    if not _WEIGHT.fullmatch(text) or float(text) <= 0:
        raise KeyLineError("weight= is no weight: give a number above 0, e.g. 2 or 0.5")
    return float(text)


def _limit(given: dict[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not _COUNT.fullmatch(text) or int(text) < 1:
        raise KeyLineError(f"{name}= is no limit: give a whole number above 0, or leave it out for no limit")
    return int(text)


def _priority(given: dict[str, str]) -> int:
    text = given.get("priority", "0")
    if not _PRIORITY.fullmatch(text) or abs(int(text)) > MAX_PRIORITY:
        raise KeyLineError(f"priority= is no priority: give a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return int(text)
