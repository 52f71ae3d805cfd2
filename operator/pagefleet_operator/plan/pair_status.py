"""What the status says of a disaggregated service alone, in a cluster and on one machine."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.inference_status import ConditionType

from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Verdict


def both_verdict(parts: Sequence[Verdict], counts: Sequence[str]) -> Verdict:
    """Return EngineReady: the part that is worse off has the word.

    Args:
        parts: PrefillReady and DecodeReady.
        counts: words for how many of each are ready.
    """
    first = next((one for one in parts if not one.holds), None)
    return first or Verdict(True, Reason.ALL_READY, ", ".join(counts))


def part_verdicts(
    parts: Sequence[Verdict], link: Verdict | None, asleep: Verdict | None
) -> dict[ConditionType, Verdict]:
    """Return the conditions that only a disaggregated service has.

    Args:
        parts: how prefill and decode engines are; empty: it has none.
        link: KVLinkReady; None: it has none.
        asleep: why none are wanted, where an autoscaler wants none.
    """
    if link is None:
        return {}
    prefill, decode = (asleep or one for one in parts)
    return {"PrefillReady": prefill, "DecodeReady": decode, "KVLinkReady": asleep or link}


def link_trouble(link: Verdict | None) -> Verdict | None:
    """Return Degraded for engines that are there and pass no K/V; None: they do, or are still on their way."""
    if link is None or link.reason not in (Reason.KV_INCOMPATIBLE, Reason.KV_LINK_DOWN):
        return None
    return Verdict(True, link.reason, link.message)
