"""What one engine says of its K/V transfer, out of its facts and its metrics page.

Engines are not trusted: what cannot be read is left out.
"""

from __future__ import annotations

import math
import re

from pagefleet_protocol.engine_facts import EngineFactsError, decode_facts

from pagefleet_operator.plan.kv_link import KvEngineSeen

PEERS = "pagefleet_engine_kv_transfer_peers"
_SAMPLE = re.compile(rf'{PEERS}\{{(?:[^}}]*,)?state="([a-z_]{{1,32}})"[^}}]*\}} ([0-9.e+]{{1,32}})')


def read_kv_engine(name: str, facts: bytes | None, metrics: bytes | None) -> KvEngineSeen | None:
    """Return what an engine said; None: it does not say what it is.

    Args:
        name: of the engine.
        facts: of FACTS_PATH; None: no answer.
        metrics: in Prometheus' text format; None: no answer.
    """
    try:
        own = decode_facts(facts) if facts is not None else None
    except EngineFactsError:
        own = None
    if own is None:
        return None
    if own.kv_transfer is None:
        return KvEngineSeen(name, "both", "")
    return KvEngineSeen(name, own.kv_transfer.role, own.kv_transfer.compatibility, _peers(metrics or b""))


def _peers(metrics: bytes) -> dict[str, int]:
    found: dict[str, int] = {}
    for state, count in _SAMPLE.findall(metrics.decode(errors="replace")):
        try:
            value = float(count)
        except ValueError:
            continue
        if math.isfinite(value) and value < 1e6:
            found[state] = found.get(state, 0) + int(value)
    return found
