"""When a peer whose links broke may be dialled again: later each time, until one of its links carries a frame."""

from __future__ import annotations

from collections import OrderedDict

from pagefleet_kv.p2p.planes.device.link import LinkBroken

FIRST_S = 0.5
MOST_S = 15.0
MAX_PEERS = 256


class Redial:
    """Of one plane. Used by one thread."""

    def __init__(self) -> None:
        self._pauses: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer -> its pause, and when that is over."""

    def check(self, peer: str, now: float) -> None:
        """Raise while a peer is left alone.

        Raises:
            LinkBroken: it is not time yet.
        """
        _, until = self._pauses.get(peer, (0.0, 0.0))
        if now < until:
            raise LinkBroken(f"its links broke: it is left alone for {until - now:.1f} s more")

    def failed(self, peer: str, now: float) -> None:
        """A link broke, or did not come about. While the peer is left alone already, that counts for nothing."""
        pause, until = self._pauses.pop(peer, (0.0, 0.0))
        if now >= until:
            pause = min(MOST_S, pause * 2) if pause else FIRST_S
            until = now + pause
        self._pauses[peer] = (pause, until)
        if len(self._pauses) > MAX_PEERS:
            self._pauses.popitem(last=False)

    def worked(self, peer: str) -> None:
        """A link of the peer's carried frames before it broke: begin anew."""
        self._pauses.pop(peer, None)
