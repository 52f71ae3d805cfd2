"""The figures of several processes as those of one: counts are added up, what all see alike is taken once.

Works on Prometheus text as the workers write it (their library's own output), line by line: a scrape must not keep the
event loop, and a parser that understands everything takes twenty times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagefleet_protocol import metric_names as names

_LEARNED = frozenset({names.ROUTER_PREFILL_RATE, names.ROUTER_DECODE_RATE, names.ROUTER_TRANSFER_RATE})
"""Means over those processes that say something."""
_SEEN_ALIKE = frozenset(
    {
        "pagefleet_router_endpoints",
        "pagefleet_router_engine_requests_running",
        "pagefleet_router_engine_requests_waiting",
        "pagefleet_router_engine_kv_usage_ratio",
        "pagefleet_router_kv_blocks",
        "pagefleet_router_kv_engines_followed",
        names.ROUTER_ROLE_ENGINES,
        names.ROUTER_ROLE_REQUESTS,
        names.ROUTER_ROLE_WAITING,
        names.ROUTER_ROLE_KV_USAGE,
    }
)
"""What engines say of themselves: the word of the process that answers."""
_FLEET = "pagefleet_router_fleet_"
_LARGEST = frozenset({names.ROUTER_FLEET_GENERATED_TOKENS})
"""Counted by each for the whole fleet since it looks: the one that has looked for longest is right."""


class Exposition:
    """A text taken apart: family heads with their samples, in order.

    Raises:
        ValueError: the text is no exposition.
    """

    def __init__(self, text: bytes) -> None:
        self.heads: dict[str, list[str]] = {}
        """HELP and TYPE lines by family."""
        self.samples: dict[str, dict[str, float]] = {}
        """Values by name with labels, by family."""
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                self.heads.setdefault(family, []).append(line)
                self.samples.setdefault(family, {})
            elif line:
                name, _, value = line.rpartition(" ")
                if not family or not name:
                    raise ValueError("a sample without a family or a value")
                self.samples[family][name] = float(value)


def merge(own: bytes, others: Iterable[bytes]) -> bytes:
    """Return one exposition for all processes.

    Args:
        own: of the process that answers; its word counts where all see the same.
        others: of the other ones. One that cannot be read is left out.
    """
    first = Exposition(own)
    parts = [first]
    for text in others:
        try:
            parts.append(Exposition(text))
        except ValueError:
            continue
    heads: dict[str, list[str]] = {}
    for part in parts:
        for family, lines in part.heads.items():
            heads.setdefault(family, lines)
    written = []
    for family, lines in heads.items():
        written += lines
        for name, value in _merge_family(family, [part.samples.get(family, {}) for part in parts]).items():
            written.append(f"{name} {_shown(value)}")
    return ("\n".join(written) + "\n").encode()


def _merge_family(family: str, parts: Sequence[dict[str, float]]) -> dict[str, float]:
    if family.endswith("_info") or family in _SEEN_ALIKE or (family.startswith(_FLEET) and family not in _LARGEST):
        return parts[0]
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    if family in _LARGEST:
        return {name: max(found) for name, found in values.items()}
    if family in _LEARNED:
        return {name: sum(found) / len(found) for name, found in values.items()}
    return {name: sum(found) for name, found in values.items()}


def _shown(value: float) -> str:
    return repr(value).replace("inf", "Inf").replace("nan", "NaN")
