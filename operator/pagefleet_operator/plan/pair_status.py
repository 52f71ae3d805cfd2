"""What the status says of a disaggregated service alone, from what was seen of its two parts in a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.inference_status import ConditionType

from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.role_health import RoleSeen, role_verdict
from pagefleet_operator.plan.verdict import Verdict


def both_verdict(parts: Sequence[RoleSeen], gate: Verdict | None) -> Verdict | None:
    """Return EngineReady: the part that is worse off has the word. None: there are no parts, or nothing is wanted."""
    if not any(one.wanted for one in parts):
        return None
    verdicts = [role_verdict(one, gate) for one in parts]
    first = next((one for one in verdicts if not one.holds), None)
    return first or Verdict(True, Reason.ALL_READY, ", ".join(one.count for one in parts))


def part_verdicts(
    parts: Sequence[RoleSeen], gate: Verdict | None, link: Verdict | None, asleep: Verdict | None
) -> dict[ConditionType, Verdict]:
    """Return the conditions that only a disaggregated service has.

    Args:
        parts: prefill and decode engines; empty: it has none.
        gate: why there are none yet, where there are none on purpose.
        link: KVLinkReady.
        asleep: why none are wanted, where an autoscaler wants none.
    """
    if link is None:
        return {}
    prefill, decode = (asleep or role_verdict(one, gate) for one in parts)
    return {"PrefillReady": prefill, "DecodeReady": decode, "KVLinkReady": asleep or link}
