"""What every exchange uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagefleet_router.admission.admission import Admission
from pagefleet_router.exchange.dispatcher import Dispatcher
from pagefleet_router.exchange.forwarding import Transfers
from pagefleet_router.exchange.tracing import RequestTraces
from pagefleet_router.tokens.prompt_reader import PromptReader
from pagefleet_router.wire.client_connection import HoldTiming
from pagefleet_router.wire.pool import UpstreamPools


@dataclass(frozen=True, slots=True)
class Services:
    """Objects that live as long as the router. Timeouts in seconds."""

    dispatcher: Dispatcher
    pools: UpstreamPools
    admission: Admission
    prompts: PromptReader
    first_byte_timeout: float
    gap_timeout: float
    hold: HoldTiming
    holds: bool = False
    """Whether requests may wait for a model's first engine."""
    explain: bool = False
    """Whether clients may ask how engines were chosen."""
    wall_clock: Callable[[], float] = time.time
    """Seconds since the epoch, for `created` in answers."""
    traces: RequestTraces = field(default_factory=RequestTraces)
    """Off unless given."""
    transfers: Transfers | None = None
    """Needed where the dispatcher pairs engines."""
