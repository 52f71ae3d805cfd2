"""The leader's machines: this one, and those whose followers come to its port."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pagefleet_protocol.fleet_key import FleetKey, FleetKeyError, read_fleet_key

from pagefleet_engine.config import NO_FLEET_KEY, EngineConfig
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.local_node import LocalNode, default_threads
from pagefleet_engine.executor.messages import StartFailed
from pagefleet_engine.executor.node import RankNode
from pagefleet_engine.nodes.agreement import commit_of, model_digest
from pagefleet_engine.nodes.link import NodeLink, Terms
from pagefleet_engine.nodes.messages import Present
from pagefleet_engine.nodes.model_copy import ONLY_COPY, ModelCopy
from pagefleet_engine.ranks.network import address_towards, named_address

_LOOK_S = 0.05
_log = logging.getLogger(__name__)


class SeveralMachines:
    """Implements `Machines` where followers come to a port of this one.

    The first copy's link hears of every machine, also of those that have no ranks of it: so one that was started
    otherwise is told what differs, whatever it takes itself for.

    Args:
        config: of the engine; it names the port.
        device: that ranks compute on.
        folder: of the model.
        fleet_key_file: of the secret that all have.
        of: which copy of the model the ranks are.

    Raises:
        ConfigError: there is no secret, or the port cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        folder: Path,
        fleet_key_file: str | None,
        of: ModelCopy = ONLY_COPY,
    ) -> None:
        parallel = config.parallel
        assert parallel.master_addr is not None
        self._config, self._device, self._copy = config, device, of
        nodes = parallel.nodes_of(of.number)
        remote = [(node, parallel.ranks_of(node, of.number)) for node in nodes if node > 0]
        present = Present(model_digest(folder), device.type)
        self._num_threads = default_threads(config, parallel.world_size // len(nodes))
        terms = Terms(config, present, self._num_threads, commit_of(folder), of)
        port = parallel.port_of(of.number)
        self._link = NodeLink(terms, parallel.master_addr, port, read_key(fleet_key_file), remote)
        self.nodes: list[RankNode] = [*self._link.nodes.values()]
        """See Machines."""

    def start(self, folder: Path, command: Sequence[str]) -> None:
        """See Machines. Waits until all machines have come."""
        link, parallel = self._link, self._config.parallel
        begin_with_all(link, parallel.rank_wait_timeout)
        if not (ranks := parallel.ranks_of(0, self._copy.number)):
            return
        others = [node.address for node in link.nodes.values()]
        master = str(parallel.master_addr)
        address = address_towards(others[0], link.port) if others else named_address(master, link.port)
        shares = self._copy.shares(len(ranks))
        here = LocalNode(ranks, self._config, self._device, link.rendezvous, address, shares)
        self.nodes.insert(0, here)
        here.start(str(folder), command, self._num_threads)

    def close(self) -> None:
        """See Machines."""
        self._link.close()


def begin_with_all(link: NodeLink, within_s: float, look: Callable[[], None] = lambda: None) -> None:
    """Begin as soon as all machines have come. `look` is called meanwhile, and may raise.

    Raises:
        ConfigError: some never came, the message names them; or one that came cannot do its part.
        ModelLoadError: one cannot have the model.
    """
    if names := ", ".join(str(node.node) for node in link.missing()):
        _log.info("waiting up to %.0f s for node %s at port %d", within_s, names, link.port)
    deadline = time.monotonic() + within_s
    while not link.begin():
        if (missing := link.missing()) and time.monotonic() > deadline:
            names = ", ".join(str(node.node) for node in missing)
            refused = next(
                (f" (the last one was refused: {one.last_refusal})" for one in missing if one.last_refusal), ""
            )
            raise ConfigError(
                f"node {names} never came to port {link.port} within {within_s:.0f} s{refused}: start `pagefleet "
                "serve` there with --node-rank and --headless, see its log, and whether its machine reaches this one"
            )
        look()
        for node in link.nodes.values():
            for rank, reply in node.receive():
                if isinstance(reply, StartFailed):
                    raise reply.error(f"rank {rank} on {node.host}")
            if (ended := node.ended()) is not None:
                rank, status = ended
                raise ConfigError(f"rank {rank} on {node.host} {status}")
        time.sleep(_LOOK_S)


def read_key(file: str | None) -> FleetKey:
    """Read the secret of an engine on several machines.

    Raises:
        ConfigError: there is none, or the file holds none.
    """
    if file is None:
        raise ConfigError(NO_FLEET_KEY)
    try:
        return read_fleet_key(Path(file))
    except FleetKeyError as error:
        raise ConfigError(f"fleet_key_file {file} {error}") from error
