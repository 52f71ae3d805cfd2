"""The tcp data plane: framed sockets in one thread, which moves whole blocks between sockets and pages.

It goes everywhere. On a CPU nothing is copied on the way; blocks on a device pass through host memory. Nobody who is
not invited over the control plane gets further than a hello, of which only so many wait, for so long.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time

from pagefleet_kv.errors import cannot_listen
from pagefleet_kv.p2p.data_plane import FrameArrived, FrameSent, LinkDown, LinkUp, PlaneEvent
from pagefleet_kv.p2p.planes.shell import LinkBroken, LinkSettings, PlaneShell
from pagefleet_kv.p2p.planes.tcp.hello import BadHello, Invitation, invitation_number
from pagefleet_kv.p2p.planes.tcp.link import Newcomer, PageViews, tune
from pagefleet_kv.p2p.planes.tcp.source import SourceLink
from pagefleet_kv.p2p.planes.tcp.target import TargetLink
from pagefleet_kv.port import KVPages

HANDSHAKE_S = 5.0
STALL_S = 10.0
MAX_NEWCOMERS = 32
GATHER_S = 0.005
"""That frames' events may wait for more of them while bytes flow: each ring takes the interpreter from this thread."""
_LOOK_S = 0.25
"""Between two looks at deadlines."""
_OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TcpPlane(PlaneShell[SourceLink, TargetLink]):
    """Implements `DataPlane` on sockets.

    Args:
        compatibility: `KvShape.compatibility` of what they hold.
        port: to listen on; 0: a free one.
        handshake_s: for the proofs at the beginning of a connection.
        stall_s: a peer that takes or gives nothing of a frame for so long is given up.

    Raises:
        KVConfigError: the port cannot be used.
    """

    def __init__(
        self,
        pages: KVPages,
        compatibility: bytes,
        host: str,
        port: int,
        handshake_s: float = HANDSHAKE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._listener = listen(host, port)
        super().__init__("tcp")
        self._settings = LinkSettings(PageViews(pages), compatibility, handshake_s, stall_s, self._tell)
        self.port: int = self._listener.getsockname()[1]
        self._newcomers: set[Newcomer] = set()
        self._look_at = 0.0
        self._tell_at = float("inf")
        """When the bell rings for the events so far."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._thread.wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._listens = True
        self._thread.start()

    def invite(self, peer: str) -> bytes:
        invitation = Invitation.draw(self.port)
        self._invitations.give(invitation.number, peer, invitation.secret)
        return invitation.encode()

    def hear(self, peer: str, data: bytes) -> None:
        """Sockets have nothing to say over the control plane."""

    def _tell(self, event: PlaneEvent) -> None:
        """Note an event. While frames move well, those who hear of it need not wake for each of them."""
        super()._tell(event)
        soon = time.monotonic() + GATHER_S if isinstance(event, FrameSent | FrameArrived) else 0.0
        self._tell_at = min(self._tell_at, soon)

    def _turn(self) -> None:
        ready = self._selector.select(min(_LOOK_S, max(0.0, self._tell_at - time.monotonic())))
        now = time.monotonic()
        self._thread.obey()  # before any byte is read: what was given up since gets none of them
        for key, mask in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif key.data is not None and key.data.socket.fileno() == key.fd:  # unless a command closed it
                if isinstance(key.data, Newcomer):
                    self._greet(key.data)
                else:
                    self._serve(key.data, mask, now)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            if not self._listens:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._listens = True
            for link in [link for link in self._links() if link.deadline <= now]:
                self._end(link, "it was silent for too long")
            for newcomer in [one for one in self._newcomers if one.deadline <= now]:
                self._refuse(newcomer)
        if now >= self._tell_at or not self._is_busy():
            self._tell_at = float("inf")
            self._thread.ring()

    def _is_busy(self) -> bool:
        """Whether there is enough to go on with before anybody hears of what is done."""
        return any(link.busy for link in self._sources.values()) or any(link.busy for link in self._targets.values())

    def _serve(self, link: SourceLink | TargetLink, mask: int, now: float) -> None:
        if self._guarded(link, lambda: link.ready(mask, now)):
            self._watch(link)

    def _greet(self, newcomer: Newcomer) -> None:
        try:
            hello = newcomer.read()
            if hello is not None:
                self._let_in(newcomer, hello)
        except (LinkBroken, BadHello, OSError):
            self._refuse(newcomer)

    def _refuse(self, newcomer: Newcomer) -> None:
        self._num_refused += 1
        self._newcomers.discard(newcomer)
        self._let_go(newcomer.socket)

    def _accept(self, now: float) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # whoever knocked is gone: the next may do
            if error.errno in _OUT_OF_ROOM:  # it would knock again at once, without end
                self._selector.unregister(self._listener)
                self._listens = False
            return
        try:
            tune(accepted)
        except OSError:
            accepted.close()
            return
        if len(self._newcomers) >= MAX_NEWCOMERS:
            self._num_refused += 1
            accepted.close()
            return
        newcomer = Newcomer(accepted, now + self._settings.handshake_s)
        self._newcomers.add(newcomer)
        self._selector.register(accepted, selectors.EVENT_READ, newcomer)

    def _let_in(self, newcomer: Newcomer, hello: bytes) -> None:
        number = invitation_number(hello)
        invited = self._invitations.find(number)
        if invited is None:
            raise BadHello("nobody invited it")
        peer, invitation = invited.peer, Invitation(self.port, number, invited.secret)
        invitation.check_hello(hello, self._settings.compatibility)
        self._invitations.spend(number)
        self._newcomers.discard(newcomer)
        self._selector.unregister(newcomer.socket)
        if peer in self._sources:
            self._end(self._sources[peer], "it connected again")
        welcome = invitation.welcome(self._settings.compatibility)
        link = self._sources[peer] = SourceLink(newcomer.socket, peer, welcome, self._settings)
        self._tell(LinkUp(peer, "source"))
        self._watch(link)

    def _connect(self, peer: str, host: str, invitation: bytes) -> None:
        self._disconnect(peer, "target")
        try:
            invited = Invitation.decode(invitation)
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, invited.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connecting = socket.socket(family, kind, protocol)
            try:
                tune(connecting)
                with contextlib.suppress(BlockingIOError):
                    connecting.connect(address)
            except OSError:
                connecting.close()
                raise
        except (BadHello, OSError) as error:
            self._tell(LinkDown(peer, "target", f"it cannot be connected to: {error}"))
            return
        link = TargetLink(connecting, peer, invited, self._landings, self._settings, time.monotonic())
        self._targets[peer] = link
        self._watch(link)

    def _changed(self, link: SourceLink) -> None:
        self._watch(link)

    def _watch(self, link: SourceLink | TargetLink) -> None:
        """Wait for what a link is interested in now."""
        known = self._selector.get_map().get(link.socket)
        if known is None:
            self._selector.register(link.socket, link.interest, link)
        elif known.events != link.interest:
            self._selector.modify(link.socket, link.interest, link)

    def _remove(self, link: SourceLink | TargetLink, reason: str) -> None:
        if isinstance(link, TargetLink):
            link.close()
        self._let_go(link.socket)

    def _let_go(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _close_all(self) -> None:
        self._listener.close()
        for connection in (*self._newcomers, *self._links()):
            connection.socket.close()
        self._selector.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens.

    Raises:
        KVConfigError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise cannot_listen(
            error, f"cannot listen for K/V on {host} port {port} ({error.strerror}): give another kv_port or kv_host"
        ) from error
    listener.setblocking(False)
    return listener
