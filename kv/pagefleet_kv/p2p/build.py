"""From the configuration to a running p2p connector."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_control import PlaneName

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.cuda_memory import host_identity
from pagefleet_kv.curve import load_fleet_key
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.p2p.connector import P2PConnector
from pagefleet_kv.p2p.control_plane import ControlPlane
from pagefleet_kv.p2p.data_plane import DataPlane
from pagefleet_kv.p2p.driver import DriverParts
from pagefleet_kv.p2p.peers import AllowedPeers, parse_peers
from pagefleet_kv.p2p.planes.device.copies import DevicePool
from pagefleet_kv.p2p.planes.device.opening import NoPlane, PlaneOpening, RankedPool, RankPlane
from pagefleet_kv.p2p.planes.device.plane import HANDSHAKE_S
from pagefleet_kv.p2p.planes.device.ranked import RankedPlane
from pagefleet_kv.p2p.planes.local_device import CARRIERS, LocalDevice, MakeCarriers
from pagefleet_kv.p2p.planes.tcp.plane import TcpPlane, listen
from pagefleet_kv.p2p.transfer.settings import P2PSettings
from pagefleet_kv.p2p.transfer.source import Source
from pagefleet_kv.p2p.transfer.target import Target
from pagefleet_kv.port import BuiltConnector, EngineIdentity, EngineSide, KVPages

CHOSEN_PORT_TRIES = 20


def check(config: KVTransferConfig, identity: EngineIdentity) -> None:
    """See ConnectorKind: peers that can be read, the fleet's key, and ports that are free."""
    parse_peers(config.kv_peers)
    check_listening(config, identity)


def build(config: KVTransferConfig, side: EngineSide, settings: P2PSettings | None = None) -> BuiltConnector:
    """Listen, and make the connector.

    Args:
        settings: limits; default: as the configuration says.

    Raises:
        KVConfigError: there is no fleet key, an address cannot be used, or the data plane cannot be had here.
    """
    key = fleet_key(side.identity)
    entries = parse_peers(config.kv_peers)
    settings = settings or settings_of(config, side.pages.bytes_per_block)
    compatibility = side.shape.compatibility
    planes: dict[PlaneName, DataPlane] = dict(device_planes(config, side, settings.blocks_per_frame))
    try:
        control, tcp = _listen(config, side, key)
    except KVConfigError:
        for plane in planes.values():
            plane.close()
        raise
    if tcp is not None:
        planes["tcp"] = tcp
    host = host_identity() if "cuda_ipc" in planes else ""
    invite: Mapping[PlaneName, Callable[[str], bytes]] = {name: plane.invite for name, plane in planes.items()}
    parts = DriverParts(
        source=Source(settings, side.shape, side.identity.incarnation, invite, host),
        target=Target(settings, side.shape, side.identity.incarnation, tuple(planes), host),
        control=control,
        planes=planes,
        peers=AllowedPeers(entries),
        pages=side.pages,
        compatibility=compatibility,
    )
    return BuiltConnector(P2PConnector(parts, side.shape, config.kv_send_type == "put"), control.port)


def settings_of(config: KVTransferConfig, block_bytes: int) -> P2PSettings:
    """Return the limits that the configuration gives, and the defaults of the others."""
    return dataclasses.replace(
        P2PSettings(block_bytes),
        send_type=config.kv_send_type,
        lease=config.kv_lease,
        transfer_timeout=config.kv_transfer_timeout,
        buffer_bytes=config.kv_buffer_size,
        overflow_bytes=config.kv_overflow_size,
        recompute_budget=config.kv_recompute_budget,
    )


def _listen(config: KVTransferConfig, side: EngineSide, key: FleetKey) -> tuple[ControlPlane, TcpPlane | None]:
    """Take the control port and, for tcp, the one after it; where any will do, try until both are free."""
    tries = 1 if config.kv_port else CHOSEN_PORT_TRIES
    while True:
        tries -= 1
        control = ControlPlane(config.kv_host, config.kv_port, key)
        if not has_tcp(config):
            return control, None
        try:
            return control, TcpPlane(side.pages, side.shape.compatibility, config.kv_host, control.port + 1)
        except KVConfigError:
            control.close()
            if not tries:
                raise


def check_listening(config: KVTransferConfig, identity: EngineIdentity) -> None:
    """Refuse, before anything is loaded, what nobody could be heard with. A port may still be taken afterwards.

    Raises:
        KVConfigError: there is no fleet key, or an address cannot be used.
    """
    fleet_key(identity)
    listen(config.kv_host, config.kv_port).close()
    if config.kv_port and has_tcp(config):
        listen(config.kv_host, config.kv_port + 1).close()


def fleet_key(identity: EngineIdentity) -> FleetKey:
    """Return the key of the fleet, without which nobody is heard.

    Raises:
        KVConfigError: there is none.
    """
    if identity.fleet_key_file is None:
        raise KVConfigError("kv_connector p2p passes K/V to who has the fleet's key: give fleet_key_file")
    return load_fleet_key(identity.fleet_key_file)


def has_tcp(config: KVTransferConfig) -> bool:
    """Return whether blocks may travel by tcp, which takes the port after the control port."""
    return config.kv_data_plane in ("auto", "tcp")


NUM_SLOTS = 16
"""Of one direction; one link uses half of them, so that frames are under way while words about others are."""
MAX_COMMUNICATORS = 28
"""torch has 32 streams to give out, and each communicator has its own."""
BEST_FIRST: tuple[PlaneName, ...] = ("cuda_ipc", "nccl")

_log = logging.getLogger(__name__)


def device_planes(
    config: KVTransferConfig,
    side: EngineSide,
    blocks_per_frame: int,
    makers: Mapping[PlaneName, MakeCarriers] | None = None,
) -> dict[PlaneName, RankedPlane]:
    """Return the planes that are asked for, best first; with `auto`, those that can be had.

    Args:
        blocks_per_frame: most blocks of a frame.
        makers: of carriers, given how many communicators may send and receive; default: NCCL and CUDA's runtime.

    Raises:
        KVConfigError: one was asked for by name and cannot be had, or kv_max_communicators does not fit.
    """
    asked = config.kv_data_plane
    if asked == "tcp":
        return {}
    if (pool := _ranked(side.pages, makers or CARRIERS)) is None:
        if asked != "auto":
            raise KVConfigError(f"kv_data_plane {asked} needs K/V on GPUs: give auto or tcp")
        return {}
    sending, receiving = config.kv_role != "decode", config.kv_role != "prefill"
    slots = NUM_SLOTS * sending, NUM_SLOTS * receiving
    most = split_communicators(config)
    planes: dict[PlaneName, RankedPlane] = {}
    for name in BEST_FIRST:
        if asked not in ("auto", name):
            continue
        opening = PlaneOpening(name, side.shape.compatibility, blocks_per_frame, slots, most)
        try:
            planes[name] = _open(opening, pool, side, by_name=asked == name)
        except NoPlane as error:
            if asked == name:
                raise KVConfigError(f"kv_data_plane {name} cannot be had: {error}") from error
            _log.info("K/V does not travel by %s: %s", name, error)
    return planes


def _ranked(pages: KVPages, makers: Mapping[PlaneName, MakeCarriers]) -> RankedPool | None:
    """None where there are no devices that planes could be opened on."""
    if isinstance(pages, DevicePool):
        return LocalDevice(pages, makers)
    if not isinstance(pages, RankedPool):
        return None
    if not pages.devices:
        _log.info("K/V of these ranks travels by tcp: auto takes other planes between GPUs of one machine alone")
        return None
    return pages


def _open(opening: PlaneOpening, pool: RankedPool, side: EngineSide, *, by_name: bool) -> RankedPlane:
    """Raises NoPlane where a rank cannot have it."""
    if opening.name == "nccl":
        _check_nccl(len(pool.devices), side, by_name=by_name)
    opened: list[RankPlane] = []
    try:
        for device in pool.devices:
            opened.append(device.open(opening))
    except NoPlane:
        for plane in opened:
            plane.close()
        raise
    turns = pool.turns(opening.name)
    return RankedPlane(opening.name, opened, turns, side.shards, side.pages.bytes_per_block, HANDSHAKE_S)


def _check_nccl(num_ranks: int, side: EngineSide, *, by_name: bool) -> None:
    """Raises NoPlane where NCCL's kernels and what ranks send each other could wait for each other for ever, or where
    nobody asked for what never ran on GPUs."""
    if side.steps_with_copies and isinstance(side.pages, DevicePool):  # no turns are given among steps of this process
        raise NoPlane("nothing orders its kernels and what copies of the model send each other")
    if (num_ranks > 1 or side.steps_with_copies) and not by_name:
        raise NoPlane("engines of several ranks take it only by name")


def split_communicators(config: KVTransferConfig) -> tuple[int, int]:
    """Return how many communicators may send and how many receive.

    Raises:
        KVConfigError: there are too few for both, or more than streams.
    """
    most = config.kv_max_communicators
    if most > MAX_COMMUNICATORS:
        raise KVConfigError(f"kv_max_communicators is {most}: give at most {MAX_COMMUNICATORS}")
    if config.kv_role == "prefill":
        return most, 0
    if config.kv_role == "decode":
        return 0, most
    if most < 2:
        raise KVConfigError("kv_max_communicators is 1, and kv_role both sends and receives: give 2 or more")
    return most // 2, most - most // 2
