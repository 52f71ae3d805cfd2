"""Reads what the routers of one service on this machine count into the window of their last minute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from pagefleet_operator.autoscale.router_page import read_router_page
from pagefleet_operator.autoscale.signals import FleetWindow
from pagefleet_operator.local.probe import fetch

METRICS_PATH = "/metrics"


async def listen(window: FleetWindow, routers: Mapping[str, str], timeout_s: float) -> float:
    """Ask all routers at once; those that do not answer say nothing. Returns when they spoke, in monotonic seconds.

    Args:
        window: takes in what they say.
        routers: the base URL of each, by name.
        timeout_s: of each.
    """
    pages = await asyncio.gather(*(fetch(url + METRICS_PATH, timeout_s) for url in routers.values()))
    now = time.monotonic()
    for name, page in zip(routers, pages, strict=True):
        if page is not None and (reading := read_router_page(page)) is not None:
            window.add(name, reading, now)
    return now
