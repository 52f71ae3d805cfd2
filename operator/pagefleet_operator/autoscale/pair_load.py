"""What the advice on prefill and decode engines needs of what routers say."""

from __future__ import annotations

from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.plan.pair_ratio import PairLoad


def pair_load(signals: FleetSignals) -> PairLoad | None:
    """Return the measured load; None: a router is silent."""
    if not signals.complete:
        return None
    return PairLoad(
        prompt_tokens_per_s=signals.prompt_tokens_per_s or 0.0,
        prefill_rate=signals.prefill_rate,
        kv_usage=signals.kv_usage,
        engines=signals.engines,
    )
