"""One engine as the console shows it: what the table, its probes and its metrics say, in the console's words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagefleet_protocol.console_state import EngineState, Phase
from pagefleet_protocol.load_progress import decode_loading

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.signals.monitor import Watched

_READY: tuple[Phase, None, None] = "ready", None, None
_ENDS = b'"server_shutting_down"'


def engine_state(engine: EngineView, watched: Watched, num_faults: int) -> EngineState:
    """Return an engine's row; it takes some ten microseconds, most of it for the metrics."""
    phase, reason, load = phase_of(engine, watched)
    recent, polled, facts = watched.history.recent(), engine.load, engine.facts
    return EngineState(
        name=engine.id,
        url=engine.endpoint.url,
        model=engine.endpoint.model,
        role=engine.role,
        revision=_revision(engine),
        phase=phase,
        reason=reason,
        load=load,
        running=None if polled is None else round(polled.num_running),
        waiting=None if polled is None else round(polled.num_waiting),
        max_running=None if facts is None else facts.max_num_seqs,
        prompt_tokens_s=recent.prompt_tokens_s,
        generated_tokens_s=recent.generated_tokens_s,
        kv_usage=None if polled is None else round(polled.kv_usage, 4),
        prefix_hit_ratio=recent.prefix_hit_ratio,
        ttft=recent.ttft,
        faults=num_faults,
    )


def _revision(engine: EngineView) -> str | None:
    """Return what whoever lists the engine says; else what it says itself, once it answers."""
    endpoint, facts = engine.endpoint, engine.facts
    listed = endpoint.revision or (endpoint.on_trial.revision if endpoint.on_trial is not None else None)
    return listed or (None if facts is None else facts.revision)


def phase_of(engine: EngineView, watched: Watched) -> tuple[Phase, str | None, float | None]:
    """Return an engine's phase, why it is not ready, and how far its loading is."""
    endpoint = engine.endpoint
    if endpoint.draining:
        return "draining", "it ends what it has and gets nothing new", None
    if engine.ejected:
        return "unreachable", "it failed several requests in a row, and is tried again soon", None
    if engine.ready:
        return ("starting", "whoever lists it has yet to find it ready", None) if endpoint.coming else _READY
    answer = b"" if watched.answer is None else watched.answer.body
    if _ENDS in answer:
        return "draining", "it was told to stop", None
    loading = decode_loading(answer)
    if loading is not None and loading.phase != "starting":
        return "loading", loading.describe(), loading.share
    is_gone = loading is None and (watched.was_ready or engine.stuck)
    return ("unreachable" if is_gone else "starting"), watched.reason, None


def flow_rates(
    now: Mapping[tuple[str, str], tuple[int, float]],
    before: Mapping[tuple[str, str], tuple[int, float]],
    seconds: float,
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return transfers and bytes a second of each pair of engines, between two looks at their counts."""
    rates = {}
    for pair, (count, total) in now.items():
        old_count, old_total = before.get(pair, (0, 0.0))
        if count < old_count:  # it left and came back
            old_count, old_total = 0, 0.0
        rates[pair] = (count - old_count) / max(seconds, math.ulp(1.0)), (total - old_total) / max(seconds, 1e-3)
    return rates
