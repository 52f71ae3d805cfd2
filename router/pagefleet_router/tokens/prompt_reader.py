"""Where a request's prompt is turned into tokens and blocks, if anybody needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric

from pagefleet_router.request_view import RequestView


class PromptReader(Protocol):
    """Completes the view of an admitted request."""

    def read(
        self, route: str, body: bytes, view: RequestView, then: Callable[[RequestView], None]
    ) -> RequestView | None:
        """Return the complete view at once, or None: then `then` is called with it later, from the event loop.

        Never fails: a prompt that cannot be read is the engine's to refuse, and its view stays as it is.
        """

    async def stop(self) -> None:
        """Read nothing more."""

    def collect(self) -> Iterable[Metric]:
        """Return its metrics."""


class PlainPrompts:
    """Leaves every prompt unread: engines tokenize, and prefixes are guessed from the text."""

    def read(
        self, route: str, body: bytes, view: RequestView, then: Callable[[RequestView], None]
    ) -> RequestView | None:
        """See PromptReader."""
        return view

    async def stop(self) -> None:
        """See PromptReader."""

    def collect(self) -> Iterable[Metric]:
        """See PromptReader."""
        return ()
