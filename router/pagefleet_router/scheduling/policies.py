"""The policies by their names."""

from __future__ import annotations

import random
from collections.abc import Callable

from pagefleet_router.config import PolicyName
from pagefleet_router.prefix.knowledge import PrefixKnowledge
from pagefleet_router.scheduling.auto import Auto
from pagefleet_router.scheduling.blind import LeastLoad, RoundRobin
from pagefleet_router.scheduling.policy import Policy
from pagefleet_router.scheduling.sticky import LongestPrefix, SessionHash


def make_policy(
    name: PolicyName, knowledge: PrefixKnowledge, clock: Callable[[], float], rng: random.Random | None = None
) -> Policy:
    """Return a policy.

    Args:
        name: which one.
        knowledge: of the engines' caches.
        clock: that of the table.
        rng: for ties and samples.
    """
    rng = rng or random.Random()  # noqa: S311 - guards nothing
    if name == "least-load":
        return LeastLoad(rng, clock)
    if name == "round-robin":
        return RoundRobin(clock)
    auto = Auto(knowledge, rng, clock)
    if name == "prefix":
        return LongestPrefix(knowledge, auto)
    return SessionHash(knowledge, auto) if name == "session" else auto
