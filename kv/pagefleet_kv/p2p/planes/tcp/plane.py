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
from collections.abc import Sequence

from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.p2p.data_plane import (
    End,
    Frame,
    FrameArrived,
    FrameSent,
    Landed,
    Landing,
    LinkDown,
    LinkUp,
    PlaneEvent,
    Withdrawn,
)
from pagefleet_kv.p2p.planes.invitations import Invitations
from pagefleet_kv.p2p.planes.landing import Landings
from pagefleet_kv.p2p.planes.tcp.hello import BadHello, Invitation, invitation_number
from pagefleet_kv.p2p.planes.tcp.link import Connection, LinkError, LinkSettings, Newcomer, PageViews, tune
from pagefleet_kv.p2p.planes.tcp.source import SourceLink
from pagefleet_kv.p2p.planes.tcp.target import TargetLink
from pagefleet_kv.p2p.planes.thread import PlaneThread
from pagefleet_kv.port import KVPages

HANDSHAKE_S = 5.0
STALL_S = 10.0
MAX_NEWCOMERS = 32
GATHER_S = 0.005
"""That frames' events may wait for more of them while bytes flow: each ring takes the interpreter from this thread."""
_LOOK_S = 0.25
"""Between two looks at deadlines."""
_OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TcpPlane:
    """Implements `DataPlane` on sockets.

    Args:
        pages: of this engine's worker.
        compatibility: `KvShape.compatibility` of what they hold.
        host: address to listen on.
        port: to listen on; 0: a free one.
        handshake_s: for the proofs at the beginning of a connection.
        stall_s: a peer that takes or gives nothing of a frame for so long is given up.

    Raises:
        KVConfigError: the port cannot be used.

    Attributes:
        port: where it listens.
    """

    name = "tcp"

    def __init__(
        self,
        pages: KVPages,
        compatibility: bytes,
        host: str,
        port: int,
        handshake_s: float = HANDSHAKE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._settings = LinkSettings(PageViews(pages), compatibility, handshake_s, stall_s, self._tell)
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._landings = Landings()
        self._invitations = Invitations()
        self._sources: dict[str, SourceLink] = {}
        self._targets: dict[str, TargetLink] = {}
        self._newcomers: set[Newcomer] = set()
        self._num_refused = 0
        self._look_at = 0.0
        self._tell_at = float("inf")
        """When the bell rings for the events so far."""
        self._thread = PlaneThread("kv tcp", self._turn, self._close_all)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._thread.wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._listens = True
        self._thread.start()

    @property
    def bell(self) -> int:
        """Readable while `events` has something to tell."""
        return self._thread.bell

    def invite(self, peer: str) -> bytes:
        """Return what one connection of the peer needs; the oldest of too many invitations is taken back."""
        invitation = Invitation.draw(self.port)
        self._invitations.give(invitation.number, peer, invitation.secret)
        return invitation.encode()

    def connect(self, peer: str, host: str, invitation: bytes) -> None:
        """Begin to connect to a source; an older connection to it is closed."""
        self._thread.do(lambda: self._connect(peer, host, invitation))

    def disconnect(self, peer: str, end: End) -> None:
        """Close a link, and at its source take invitations back; waits for what is read or written just now."""
        if end == "source":
            self._invitations.take_back(peer)
        self._thread.do_now(lambda: self._disconnect(peer, end))

    def send(self, peer: str, frame: Frame) -> None:
        """Queue a frame; without a link `LinkDown` follows."""
        self._thread.do(lambda: self._send(peer, frame))

    def withdraw(self, transfer_id: bytes) -> None:
        """Send none of a transfer's frames any more."""
        self._thread.do(lambda: self._withdraw(transfer_id))

    def land(self, peer: str, landing: Landing) -> None:
        """Accept a transfer's frames, from now on: the source sends as soon as it is told to."""
        self._landings.add(peer, landing)

    def forget(self, transfer_id: bytes) -> None:
        """Accept a transfer's frames no more."""
        self._thread.do(lambda: self._forget(transfer_id))

    def hear(self, peer: str, data: bytes) -> None:
        """Sockets have nothing to say over the control plane."""

    def events(self) -> Sequence[PlaneEvent]:
        """Return what happened since the last call.

        Raises:
            TransfersDead: the thread has ended by a mistake of ours.
        """
        return self._thread.events()

    def counters(self) -> dict[str, float]:
        """Return how many connections nobody had invited."""
        return {"refused_connections_total": float(self._num_refused)}

    def close(self) -> None:
        """Close all sockets and end the thread."""
        self._thread.close()

    def _tell(self, event: PlaneEvent) -> None:
        """Note an event. While frames move well, those who hear of it need not wake for each of them."""
        self._thread.tell(event)
        soon = time.monotonic() + GATHER_S if isinstance(event, FrameSent | FrameArrived) else 0.0
        self._tell_at = min(self._tell_at, soon)

    def _turn(self) -> None:
        ready = self._selector.select(min(_LOOK_S, max(0.0, self._tell_at - time.monotonic())))
        now = time.monotonic()
        self._thread.obey()  # before any byte is read: what was given up since gets none of them
        for key, mask in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.data, Newcomer | SourceLink | TargetLink) and key.data.socket.fileno() == key.fd:
                self._serve(key.data, mask, now)  # unless a command closed it
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            if not self._listens:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._listens = True
            for late in [one for one in self._connections() if one.deadline <= now]:
                self._end(late, "it was silent for too long")
        if now >= self._tell_at or not self._is_busy():
            self._tell_at = float("inf")
            self._thread.ring()

    def _is_busy(self) -> bool:
        """Whether there is enough to go on with before anybody hears of what is done."""
        return any(link.busy for link in self._sources.values()) or any(link.busy for link in self._targets.values())

    def _connections(self) -> list[Connection]:
        return [*self._newcomers, *self._sources.values(), *self._targets.values()]

    def _serve(self, connection: Connection, mask: int, now: float) -> None:
        try:
            connection.ready(mask, now)
            if isinstance(connection, Newcomer) and connection.hello is not None:
                self._let_in(connection, connection.hello)
                return
        except (LinkError, BadHello, OSError) as error:
            self._end(connection, error.strerror or "lost" if isinstance(error, OSError) else str(error))
            return
        self._watch(connection)

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
        self._watch(newcomer)

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
        if peer in self._targets:
            self._remove(self._targets[peer])
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

    def _disconnect(self, peer: str, end: End) -> None:
        link = self._sources.get(peer) if end == "source" else self._targets.get(peer)
        if link is not None:
            self._remove(link)

    def _send(self, peer: str, frame: Frame) -> None:
        link = self._sources.get(peer)
        if link is None:
            self._tell(LinkDown(peer, "source", "it is not connected"))
            return
        link.queue(frame, time.monotonic())
        self._watch(link)

    def _withdraw(self, transfer_id: bytes) -> None:
        for link in self._sources.values():
            link.withdraw(transfer_id)
            self._watch(link)
        self._tell(Withdrawn(transfer_id))

    def _forget(self, transfer_id: bytes) -> None:
        self._landings.remove(transfer_id)
        for link in self._targets.values():
            link.forget(transfer_id)
        self._tell(Landed(transfer_id))

    def _watch(self, connection: Connection) -> None:
        """Wait for what a connection is interested in now."""
        known = self._selector.get_map().get(connection.socket)
        if known is None:
            self._selector.register(connection.socket, connection.interest, connection)
        elif known.events != connection.interest:
            self._selector.modify(connection.socket, connection.interest, connection)

    def _end(self, connection: Connection, reason: str) -> None:
        """Close a connection that has come to nothing."""
        if isinstance(connection, Newcomer):
            self._num_refused += 1
        elif isinstance(connection, SourceLink | TargetLink):
            end: End = "source" if isinstance(connection, SourceLink) else "target"
            self._tell(LinkDown(connection.peer, end, reason))
        self._remove(connection)

    def _remove(self, connection: Connection) -> None:
        if isinstance(connection, Newcomer):
            self._newcomers.discard(connection)
        elif isinstance(connection, SourceLink):
            del self._sources[connection.peer]
        elif isinstance(connection, TargetLink):
            del self._targets[connection.peer]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _close_all(self) -> None:
        self._listener.close()
        for connection in self._connections():
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
        raise KVConfigError(
            f"cannot listen for K/V on {host} port {port} ({error.strerror}): give another kv_port or kv_host"
        ) from error
    listener.setblocking(False)
    return listener
