"""A fixed list of engines from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.endpoints import Endpoint

from pagefleet_router.discovery.source import EndpointSink


class StaticSource:
    """Engines that never change. Their ids are their host and port."""

    def __init__(self, urls: Sequence[str], model: str) -> None:
        self._endpoints = tuple(Endpoint(url.removeprefix("http://"), url, model) for url in dict.fromkeys(urls))

    async def run(self, sink: EndpointSink) -> None:
        """Report once."""
        sink.replace(self._endpoints)
