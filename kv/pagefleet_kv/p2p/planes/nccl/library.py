"""NCCL through ctypes: the dozen functions that point-to-point communicators of two ranks need, and no more.

It is the library that torch brings, or the system's. `Config` ends with the last field that is set here: NCCL reads as
many bytes as `size` says and takes its defaults for the rest. Communicators are made non-blocking, so no call here
waits for the peer; what is under way is asked for with `state`. All calls for one device come from one thread.
"""

from __future__ import annotations

import ctypes
import enum
from typing import ClassVar

from pagefleet_kv.native import bind, find_library

UNIQUE_ID_BYTES = 128
FILE_NAME = "libnccl.so.2"
OLDEST = 22700
"""2.27.0: the first whose communicators have names."""
MAGIC = 0xCAFEBEEF
UNDEFINED = -(1 << 31)
NUM_RANKS = 2

_UINT8 = 1


class NcclError(Exception):
    """NCCL cannot be used, or gave a communicator up; the message says why."""


class State(enum.Enum):
    """Of a communicator."""

    READY = 0
    IN_PROGRESS = 7


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which is passed by value."""

    _fields_: ClassVar = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """`ncclConfig_t` up to `commName`."""

    _fields_: ClassVar = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
    ]


def two_rank_config(name: str, max_ctas: int) -> Config:
    """Return the settings of a communicator that waits for nobody and takes few multiprocessors."""
    return Config(
        size=ctypes.sizeof(Config),
        magic=MAGIC,
        version=OLDEST,
        blocking=0,
        cga_cluster_size=UNDEFINED,
        min_ctas=1,
        max_ctas=max_ctas,
        net_name=None,
        split_share=UNDEFINED,
        traffic_class=UNDEFINED,
        comm_name=name.encode(),
    )


class NcclFunctions:
    """What communicators need of NCCL. Errors raise `NcclError`.

    Args:
        path: of the library, or its name for the loader.

    Raises:
        NcclError: it cannot be loaded, or is too old.

    Attributes:
        version: as NCCL counts, e.g. 22907 for 2.29.7.
    """

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
            self._bind(library)
        except (OSError, AttributeError) as error:
            raise NcclError(f"NCCL cannot be loaded: {error}") from error
        version = ctypes.c_int()
        self._check(self._get_version(ctypes.byref(version)), "ncclGetVersion")
        self.version = version.value
        if self.version < OLDEST:
            raise NcclError(f"NCCL {version_text(self.version)} is too old: {version_text(OLDEST)} or newer is needed")
        self._configs: dict[int, Config] = {}
        """Kept while the communicators live, which point at the names in them."""

    def unique_id(self) -> bytes:
        """Return UNIQUE_ID_BYTES bytes that two ranks meet by; a socket of this process listens for them."""
        unique = UniqueId()
        self._check(self._get_unique_id(ctypes.byref(unique)), "ncclGetUniqueId")
        return bytes(unique)

    def begin(self, unique_id: bytes, rank: int, name: str, max_ctas: int) -> int:
        """Begin to make a communicator on the thread's device; return its handle."""
        handle = ctypes.c_void_p()
        config = two_rank_config(name, max_ctas)
        result = self._init(
            ctypes.byref(handle), NUM_RANKS, UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        )
        try:
            self._check(result, "ncclCommInitRankConfig")
        except NcclError:
            self._abort(handle)  # one that was begun and has failed already; none is nothing to NCCL
            raise
        if not handle.value:
            raise NcclError("ncclCommInitRankConfig gave no communicator")
        self._configs[handle.value] = config
        return handle.value

    def state(self, communicator: int) -> State:
        """Return whether the last call on it has taken effect."""
        result = ctypes.c_int()
        self._check(self._get_async_error(communicator, ctypes.byref(result)), "ncclCommGetAsyncError")
        return self._check(result.value, "the communicator")

    def send(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        """Queue bytes for the other rank. Its kernel is on the stream once the state is READY."""
        self._check(self._send(address, num_bytes, _UINT8, 1, communicator, stream), "ncclSend")

    def recv(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        """Queue a place for the bytes of the other rank."""
        self._check(self._recv(address, num_bytes, _UINT8, 0, communicator, stream), "ncclRecv")

    def abort(self, communicator: int) -> None:
        """Stop what runs and free all that it has; the handle is of no use any more."""
        self._check(self._abort(communicator), "ncclCommAbort")
        self._configs.pop(communicator, None)

    def _bind(self, library: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._error_string = bind(library, "ncclGetErrorString", [number], ctypes.c_char_p)
        self._last_error = bind(library, "ncclGetLastError", [pointer], ctypes.c_char_p)
        self._get_version = bind(library, "ncclGetVersion", [ctypes.POINTER(number)])
        self._get_unique_id = bind(library, "ncclGetUniqueId", [ctypes.POINTER(UniqueId)])
        self._init = bind(
            library,
            "ncclCommInitRankConfig",
            [ctypes.POINTER(pointer), number, UniqueId, number, ctypes.POINTER(Config)],
        )
        self._get_async_error = bind(library, "ncclCommGetAsyncError", [pointer, ctypes.POINTER(number)])
        transfer: list[type] = [pointer, size, number, number, pointer, pointer]
        self._send = bind(library, "ncclSend", transfer)
        self._recv = bind(library, "ncclRecv", transfer)
        self._abort = bind(library, "ncclCommAbort", [pointer])

    def _check(self, result: int, what: str) -> State:
        try:
            return State(result)
        except ValueError:
            meaning = (self._error_string(result) or b"").decode(errors="replace")
            detail = (self._last_error(None) or b"").decode(errors="replace").strip()
            raise NcclError(f"{what}: {meaning}" + (f" ({detail[-200:]})" if detail else "")) from None


def find_nccl() -> str:
    """Return where torch's NCCL is, or the name by which the system's loader finds its own."""
    return find_library(["nvidia.nccl"], FILE_NAME)


def version_text(version: int) -> str:
    """Return 2.29.7 for 22907."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
