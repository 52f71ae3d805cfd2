"""Frozen settings of the connectors and of KV events. Field docstrings become the help of `pagefleet serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pagefleet_protocol.kv_handoff import KvRole
from pagefleet_protocol.settings.fields import Between, Bytes, Count, HostName, Seconds, check_limits

from pagefleet_kv.errors import KVConfigError

DataPlaneName = Literal["auto", "tcp", "nccl", "cuda_ipc"]
SendType = Literal["put_async", "put", "get"]
OffloadPolicy = Literal["lru", "arc"]
TwoPorts = Annotated[int, Between(0, 65534, hint=", as the next port is taken too")]
_Wait = Annotated[Seconds, Between(1, 3600)]
_Size = Annotated[Bytes, Between(1)]
_SizeOrNone = Annotated[Bytes, Between(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """K/V that comes from elsewhere and goes there."""

    kv_connector: str | None = None
    """Where K/V is passed to and taken from: p2p (engines of the fleet), offload (host memory, then disk), file (a
    folder, for study), or several, as in p2p,offload: the first that has a prompt's K/V loads it, all save."""
    kv_role: KvRole = "both"
    """prefill: computes prompts for decode engines; decode: goes on from them; both: either, and whole requests."""
    kv_port: TwoPorts = 0
    """p2p: port of its control socket; the next port takes data; of each data rank 4 more. 0: free ones."""
    kv_host: HostName = "127.0.0.1"
    """p2p: address of these two ports."""
    kv_peers: str | None = None
    """p2p: who may be asked for K/V, as HOST:PORT after commas; dns:NAME:PORT is every address of a name, file:PATH a
    file with one HOST:PORT a line; both are read again as they change. Default: nobody, if it only gives."""
    kv_data_plane: DataPlaneName = "auto"
    """p2p: how blocks travel; auto: cuda_ipc on one host with GPUs, nccl between GPUs of engines of one rank, else tcp.
    Engines of several ranks take nccl only by name."""
    kv_send_type: SendType = "put_async"
    """p2p: put_async: each chunk's blocks are sent while the next is computed; put: all at the end, and the prefill
    request ends when they have arrived; get: they are kept until the decode engine fetches them."""
    kv_buffer_size: _Size = 256 * 2**20
    """p2p: bytes of K/V that may be under way to this engine, over all transfers (also 512M, 4G)."""
    kv_overflow_size: _SizeOrNone = 2**30
    """p2p: bytes of host memory for computed blocks whose receiver is not ready; beyond it they stay in the pool."""
    kv_lease: _Wait = 30.0
    """p2p: seconds that blocks are kept for a peer that does not renew its lease."""
    kv_transfer_timeout: _Wait = 60.0
    """p2p: seconds that a request waits for its K/V at most."""
    kv_recompute_budget: Annotated[int, Between(0)] = 65536
    """Prompt tokens a minute that a decode engine computes itself for transfers that failed; beyond it such requests
    end with an error that routers retry elsewhere."""
    kv_max_communicators: Count = 16
    """nccl: pairs of engines that stay connected; the least recently used one is closed for another."""
    kv_offload_memory: _Size = 4 * 2**30
    """offload: bytes of host memory for K/V that the pool gives up."""
    kv_offload_dir: str | None = None
    """offload: folder for what the host memory gives up; file: the folder. Default of offload: no disk."""
    kv_offload_disk: _SizeOrNone = 16 * 2**30
    """offload: bytes of disk that the folder may take."""
    kv_offload_policy: OffloadPolicy = "lru"
    """offload: which blocks go first; arc also counts how often they were used."""

    def __post_init__(self) -> None:
        check_limits(self, KVConfigError)
        if "p2p" not in self.connectors:
            for name, value in (("kv_role", self.kv_role != "both"), ("kv_peers", self.kv_peers is not None)):
                if value:
                    raise KVConfigError(f"{name} is of kv_connector p2p, which is not on: give it, or leave {name} out")

    @property
    def connectors(self) -> tuple[str, ...]:
        """Names of the connectors in order of preference."""
        return tuple(name.strip() for name in (self.kv_connector or "").split(",") if name.strip())

    @property
    def host_memory(self) -> int:
        """Bytes that connectors take of this machine's memory from the start."""
        return self.kv_offload_memory if "offload" in self.connectors else 0


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Where the engine core publishes its KV events: on `port`, with answers to what was missed on the next one."""

    host: str
    port: int
    fleet_key_file: str | None
    """Its content stays out of arguments and messages: the core reads the file itself."""
