"""How many prefill and decode engines the measured load asks for, as advice in the status: nobody acts on it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from pagefleet_protocol.inference_status import RatioAdvice

from pagefleet_operator.plan.pair_rollout import Pair

PREFILL_BUSY = 0.95
"""Share of its time that an engine may spend on prompts that arrive: the rest is for what arrives unevenly."""
KV_USAGE = 0.8
"""Share of its KV cache that an engine may use, unless a target says otherwise."""
ENOUGH = "there are enough of both"
"""The advice that asks for nothing."""
_PERIOD = timedelta(minutes=1)
"""Numbers are renewed no more often: every change is written to the cluster's store."""
_CLEARLY = 0.25
"""Of an engine: what an advice has to differ by from what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoad:
    """What routers measured over the last half minute."""

    prompt_tokens_per_s: float
    """Uncached prompt tokens that arrive."""
    prefill_rate: float | None
    """Uncached prompt tokens per second that one engine computes; None: nobody knows yet."""
    kv_usage: float
    """Share of the KV cache in use, mean over `engines`."""
    engines: float
    """That the mean is of."""


def ratio_advice(
    load: PairLoad | None, have: Pair, previous: RatioAdvice | None, at: str, ranks: tuple[int, int] = (1, 1)
) -> RatioAdvice | None:
    """Return status.ratio: what the load asks for beside what there is; the last one where there is no load to tell by.

    Args:
        load: as measured; None: no router spoke.
        have: engines that are wanted now.
        previous: the last advice.
        at: now, RFC 3339.
        ranks: data ranks of each prefill and each decode engine, which the load takes for engines.
    """
    if load is None or not load.prefill_rate or load.prompt_tokens_per_s <= 0:
        return previous
    if previous is not None and datetime.fromisoformat(at) - datetime.fromisoformat(previous.at) < _PERIOD:
        return previous
    prefill = round(load.prompt_tokens_per_s / (load.prefill_rate * PREFILL_BUSY) / ranks[0], 1)
    decode = round(load.kv_usage * load.engines / KV_USAGE / ranks[1], 1)
    numbers = (
        f"{load.prompt_tokens_per_s:.0f} uncached prompt tokens/s arrive, one computes {load.prefill_rate:.0f}/s, "
        f"KV cache of {load.engines:.0f} engines {load.kv_usage:.0%} full"
    )
    message = f"{_change(prefill, decode, have)}: {numbers}"
    if previous is not None and (previous.prefill, previous.decode, previous.message) == (prefill, decode, message):
        return previous
    return RatioAdvice(prefill=prefill, decode=decode, message=message, at=at)


def _change(prefill: float, decode: float, have: Pair) -> str:
    """Say what to change; where one part has too much and the other too little, that one engine takes the other's."""
    short = (_short(prefill, have.prefill), _short(decode, have.decode))
    idle = (_idle(prefill, have.prefill), _idle(decode, have.decode))
    if short[0] and idle[1]:
        return "take a decode engine for prefill"
    if short[1] and idle[0]:
        return "take a prefill engine for decode"
    if any(short):
        parts = [name for name, lacks in zip(("prefill", "decode"), short, strict=True) if lacks]
        return f"more {' and '.join(parts)} engines are needed"
    return ENOUGH


def _short(needed: float, have: int) -> bool:
    return needed > have + _CLEARLY


def _idle(needed: float, have: int) -> bool:
    """Whether one engine could go."""
    return have > 1 and needed < have - 1 - _CLEARLY
