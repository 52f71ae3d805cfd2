"""The target's end of a tcp data connection: payloads are received straight into the blocks reserved for them.

Where a payload goes is decided when its header is whole, and again for the rest of it once its transfer was given up:
that rest is read into memory that nobody uses. So no byte reaches a block that was let go, and none of a frame that did
not come whole and right stays in one.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE

from isal.isal_zlib import crc32
from pagefleet_protocol.kv_blob import HEADER_BYTES, BlobError, BlobHeader, decode_header

from pagefleet_kv.p2p.data_plane import LinkUp
from pagefleet_kv.p2p.planes.landing import MAX_FRAME_BYTES, FrameName, Landings, arrived, refused
from pagefleet_kv.p2p.planes.shell import LinkBroken
from pagefleet_kv.p2p.planes.tcp.hello import WELCOME_BYTES, BadHello, Invitation
from pagefleet_kv.p2p.planes.tcp.link import MAX_VIEWS, QUANTUM_BYTES, TcpSettings

_SCRATCH_BYTES = 256 * 1024
_PIECE_BYTES = 256 * 1024


@dataclass(slots=True)
class _Incoming:
    """A frame whose header is whole."""

    header: BlobHeader
    blocks: Sequence[int]
    views: deque[memoryview]
    staging: memoryview | None
    num_left: int
    checksum: int = 0
    refusal: str | None = None
    """Why its payload goes nowhere."""


class TargetLink:
    """Connects to one source and receives its frames.

    Args:
        connecting: a socket whose non-blocking `connect` was begun.
    """

    def __init__(
        self,
        connecting: socket.socket,
        peer: str,
        invitation: Invitation,
        landings: Landings,
        settings: TcpSettings,
        now: float,
    ) -> None:
        self.peer = peer
        self.socket = connecting
        """Non-blocking."""
        self._invitation = invitation
        self._landings = landings
        self._settings = settings
        self._pages = settings.memory
        self.deadline = now + settings.handshake_s
        """Of the welcome, then of more bytes within a frame."""
        self._hello = memoryview(invitation.hello(settings.compatibility))
        self._welcome: bytes | None = b""
        """What of it has come; None once it was checked."""
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_filled = 0
        self._incoming: _Incoming | None = None
        self._piece = 1
        """Bytes for which the socket wakes us."""
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    @property
    def interest(self) -> int:
        """Written until the hello is, then read."""
        return EVENT_WRITE if self._hello else EVENT_READ

    @property
    def busy(self) -> bool:
        """Whether a frame is arriving."""
        return self._incoming is not None

    def forget(self, transfer_id: bytes) -> None:
        """Write no more of the frame that is arriving, if it is of this transfer."""
        incoming = self._incoming
        if incoming is not None and FrameName.decode(incoming.header.name).transfer_id == transfer_id:
            incoming.views = self._nowhere(sum(map(len, incoming.views)))
            self._refuse(incoming, "its transfer was given up")

    def close(self) -> None:
        """Leave nothing of the frame that is arriving."""
        if self._incoming is not None:
            self._refuse(self._incoming, "its link is gone")

    def ready(self, mask: int, now: float) -> None:
        """Read what has come, up to a quantum.

        Raises:
            LinkBroken: the source left, or what it sends cannot be understood.
        """
        if self._hello:
            self._greet()
            return
        if self._welcome is not None:
            self._read_welcome()
            return
        received = 0
        while received < QUANTUM_BYTES:
            try:
                count = self._receive()
            except BlockingIOError:
                break
            if count == 0:
                raise LinkBroken("the source left")
            received += count
            self._account(count)
        if received:
            in_frame = self._incoming is not None or self._header_filled
            self.deadline = now + self._settings.stall_s if in_frame else float("inf")
            self._sleep_through()

    def _sleep_through(self) -> None:
        """Be woken again when there is a good piece to read: each time costs as much as copying tens of kilobytes."""
        incoming = self._incoming
        piece = 1 if incoming is None else min(_PIECE_BYTES, incoming.num_left)
        if piece != self._piece:
            self._piece = piece
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, piece)

    def _greet(self) -> None:
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect")
        self._hello = self._hello[self.socket.send(self._hello) :]

    def _read_welcome(self) -> None:
        assert self._welcome is not None
        try:
            data = self.socket.recv(WELCOME_BYTES - len(self._welcome))
        except BlockingIOError:
            return
        if not data:
            raise LinkBroken("the source did not let it in")
        self._welcome += data
        if len(self._welcome) < WELCOME_BYTES:
            return
        try:
            self._invitation.check_welcome(self._welcome, self._settings.compatibility)
        except BadHello as error:
            raise LinkBroken(str(error)) from None
        self._welcome = None
        self.deadline = float("inf")
        self._settings.tell(LinkUp(self.peer, "target"))

    def _receive(self) -> int:
        """Read into the rest of the payload and the header after it, in one call."""
        views: list[memoryview] = []
        if self._incoming is not None:
            for view in self._incoming.views:
                if len(views) == MAX_VIEWS:
                    break
                views.append(view)
        if self._incoming is None or len(views) == len(self._incoming.views):
            views.append(self._header[self._header_filled :])
        return self.socket.recvmsg_into(views)[0]

    def _account(self, count: int) -> None:
        incoming = self._incoming
        if incoming is not None:
            count = self._advance(incoming, count)
            if incoming.views:
                return
            self._incoming = None
            self._end(incoming)
        self._header_filled += count
        if self._header_filled == HEADER_BYTES:
            self._header_filled = 0
            self._incoming = self._begin(bytes(self._header))

    @staticmethod
    def _advance(incoming: _Incoming, count: int) -> int:
        """Go on by `count` bytes; return those beyond the frame."""
        views = incoming.views
        incoming.num_left -= min(count, incoming.num_left)
        while count and views:
            view = views[0]
            taken = min(count, len(view))
            if incoming.refusal is None:
                incoming.checksum = crc32(view[:taken], incoming.checksum)
            count -= taken
            if taken == len(view):
                views.popleft()
            else:
                views[0] = view[taken:]
        return count

    def _begin(self, data: bytes) -> _Incoming:
        try:
            header = decode_header(data, self._settings.compatibility, self._pages.block_bytes)
        except BlobError as error:
            raise LinkBroken(f"a frame cannot be read: {error}") from None
        if header.num_bytes > MAX_FRAME_BYTES:
            raise LinkBroken(f"a frame says that it has {header.num_bytes} bytes")
        placed = self._landings.place(self.peer, header)
        if isinstance(placed, str):
            return _Incoming(header, (), self._nowhere(header.num_bytes), None, header.num_bytes, refusal=placed)
        views = self._pages.to_fill(placed)
        return _Incoming(header, placed, deque(views), views[0], header.num_bytes)

    def _end(self, incoming: _Incoming) -> None:
        header = incoming.header
        if incoming.refusal is None and incoming.checksum != header.checksum:
            self._refuse(incoming, "its checksum is wrong")
        if incoming.refusal is not None:
            self._settings.tell(refused(self.peer, header, incoming.refusal))
            return
        self._pages.fill(incoming.staging, incoming.blocks)
        self._landings.landed(self.peer, header)
        self._settings.tell(arrived(self.peer, header))

    def _refuse(self, incoming: _Incoming, reason: str) -> None:
        incoming.refusal = reason
        self._pages.blank(incoming.blocks)
        incoming.blocks = ()

    def _nowhere(self, num_bytes: int) -> deque[memoryview]:
        whole, rest = divmod(num_bytes, len(self._scratch))
        return deque([self._scratch] * whole + [self._scratch[:rest]] * bool(rest))
