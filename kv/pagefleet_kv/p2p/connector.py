"""The p2p connector: the scheduler's side, which turns legs of requests into transfers and never waits.

A prefill leg's blocks are offered as they are computed; a decode leg's are asked for once, by its first request. The
requests of one transfer after the first wait for it, and then find its blocks in the prefix cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pagefleet_protocol.kv_blob import KvShape
from pagefleet_protocol.kv_handoff import KvTransfer

from pagefleet_kv.p2p.agent import TransferAgent
from pagefleet_kv.p2p.driver import DriverParts
from pagefleet_kv.p2p.stream import BlockStream
from pagefleet_kv.p2p.transfer.actions import LegSettled
from pagefleet_kv.p2p.transfer.incoming import LoadJob
from pagefleet_kv.port import AnswerDone, BlockRun, KVConnector, KVRequest, KVTransferStats, TransfersDone

METRIC = "pagefleet_engine_kv_transfer"
MAX_REMEMBERED = 8192
"""Transfers whose load has ended."""


@dataclass(slots=True)
class _Leg:
    """A prefill leg until both its request and its transfer are over."""

    request_id: str
    request_over: bool = False
    answer: int | None = None
    """Number of its answer, while that is held."""
    settled: LegSettled | None = None


class P2PConnector(KVConnector):
    """K/V between engines of one fleet. It stores nothing, so there is nothing to discard.

    Args:
        holds_answers: a prefill leg is answered only when its blocks have arrived.
    """

    def __init__(self, parts: DriverParts, shape: KvShape, holds_answers: bool = False) -> None:
        self._parts = parts
        self._shape = shape
        self._holds_answers = holds_answers
        self._legs: dict[str, _Leg] = {}
        """By transfer. A second request for the same transfer is none."""
        self._answers: list[AnswerDone] = []
        """To be told by `finished`."""
        self._num_answers = 0
        self._askers: dict[str, str] = {}
        """Transfers that are to be loaded -> the request that does; the others of it wait."""
        self._loads: dict[str, str] = {}
        """Requests whose load runs -> its transfer."""
        self._settled: OrderedDict[str, None] = OrderedDict()
        """Transfers that were loaded, or in vain, or not needed: they are asked for no more."""
        self._num_saves = 0
        self._num_refused_peers = 0
        self._agent = TransferAgent(parts)

    @property
    def bell(self) -> int:
        return self._agent.bell

    def arrived(self, request: KVRequest) -> None:
        """Begin the transfer of a prefill leg: its decode engine asks already, however long the queue is."""
        if request.transfer is not None and request.transfer.leg == "prefill":
            self._begin(request, request.transfer)

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        """All full blocks of a decode leg's prompt but for its last token; None while another request loads them."""
        transfer = request.transfer
        if transfer is None or transfer.leg != "decode" or transfer.transfer_id in self._settled:
            return 0
        num_tokens = self._stream(request).num_blocks * self._shape.block_size
        if num_tokens <= num_cached_tokens:
            return 0
        asker = self._askers.setdefault(transfer.transfer_id, request.request_id)
        return num_tokens if asker == request.request_id else None

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        """Ask the prefill engine, if the configuration knows it."""
        transfer, stream = request.transfer, self._stream(request)
        run = stream.merged(runs)
        assert transfer is not None
        assert run is not None, "a load of nothing that the prompt needs"
        # Where every group has a window, it is not known what of the prompt is here.
        first = min(run.first for run in runs) if None in self._shape.windows else 0
        self._loads[request.request_id] = transfer.transfer_id
        job = LoadJob(
            request.request_id,
            bytes.fromhex(transfer.transfer_id),
            transfer.peer_address,
            transfer.peer_incarnation,
            run.first,
            run.blocks,
            run.hashes[-1],
            (stream.num_blocks - first) * self._shape.block_size,
            transfer.on_failure,
        )
        if self._parts.peers.find(job.peer) is None:
            self._num_refused_peers += 1
            self._agent.at_target(lambda target, now: target.refuse(job, now))
            return
        self._agent.at_target(lambda target, now: target.load(job, now))

    def cancel(self, request_id: str) -> None:
        self._agent.at_target(lambda target, now: target.cancel(request_id, now))

    def wanted(self, request: KVRequest, runs: Sequence[BlockRun]) -> Sequence[BlockRun]:
        """Of a prefill leg, what its decode engine can use."""
        is_prefill = request.transfer is not None and request.transfer.leg == "prefill"
        return self._stream(request).wanted(runs) if is_prefill else runs

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        """Offer a prefill leg's blocks to its decode engine. A decode leg that runs without a load needs none."""
        transfer = request.transfer
        if transfer is None:
            return None
        if transfer.leg == "decode":
            if self._askers.get(transfer.transfer_id) == request.request_id:  # others have computed it meanwhile
                del self._askers[transfer.transfer_id]
            self._not_needed(transfer)
            return None
        run = self._stream(request).merged(runs)
        if self._begin(request, transfer) is None or run is None:
            return None
        self._num_saves += 1
        number, transfer_id = self._num_saves, bytes.fromhex(transfer.transfer_id)
        self._agent.at_source(lambda source, now: source.save(transfer_id, number, run, now))
        return number

    def relieve(self, num_blocks: int) -> None:
        """Have blocks spilled that wait for their decode engines."""
        self._agent.relieve(num_blocks)

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        transfer = request.transfer
        if transfer is None:
            return None
        if transfer.leg == "decode":
            if self._askers.get(transfer.transfer_id) == request.request_id and request.request_id not in self._loads:
                del self._askers[transfer.transfer_id]
            self._not_needed(transfer)
            return None
        leg = self._begin(request, transfer)
        if leg is None:
            return None
        leg.request_over = True
        transfer_id = bytes.fromhex(transfer.transfer_id)
        self._agent.at_source(lambda source, now: source.ended(transfer_id, completed, now))
        if completed and self._holds_answers:
            self._num_answers += 1
            leg.answer = self._num_answers
        if leg.settled is not None:
            self._end_leg(leg, leg.settled)
            self._agent.ring()
        return leg.answer

    def finished(self) -> TransfersDone:
        """See KVConnector.

        Raises:
            TransfersDead: a thread has ended by a mistake of ours.
        """
        done, settled_legs = self._agent.finished()
        for load in done.loads:
            transfer_id = self._loads.pop(load.request_id, None)
            if transfer_id is not None:
                self._settle(transfer_id)
        for settled in settled_legs:
            leg = self._legs[settled.transfer_id.hex()]
            leg.settled = settled
            if leg.request_over:
                self._end_leg(leg, settled)
        answers, self._answers = self._answers, []
        return TransfersDone(done.loads, done.saves, answers)

    def drain(self) -> None:
        """Refuse transfers whose leg is not here."""
        self._agent.at_source(lambda source, _: source.drain())

    @property
    def num_owed(self) -> int:
        """Legs that are over and whose blocks are not where they should be."""
        return sum(leg.request_over for leg in self._legs.values())

    def stats(self) -> KVTransferStats:
        parts = self._parts
        totals = Counter(asdict(parts.source.counters))
        totals.update(asdict(parts.target.counters))
        counters = {
            f"{METRIC}_seconds_sum": totals.pop("seconds_sum"),
            f"{METRIC}_seconds_count": totals.pop("completed"),
            f"{METRIC}_refused_connections_total": float(parts.control.num_refused),
            f"{METRIC}_refused_peers_total": float(self._num_refused_peers),
            **{f"{METRIC}_{name}_total": total for name, total in totals.items()},
        }
        gauges = {f"{METRIC}_{name}": value for name, value in self._agent.gauges().items()}
        for plane in parts.planes.values():
            for name, value in plane.counters().items():
                kind = counters if name.endswith("_total") else gauges
                kind[f"{METRIC}_{name}"] = kind.get(f"{METRIC}_{name}", 0.0) + value
        return KVTransferStats(counters, gauges)

    def close(self) -> None:
        self._agent.close()

    def _stream(self, request: KVRequest) -> BlockStream:
        return BlockStream(self._shape, request.num_prompt_tokens)

    def _begin(self, request: KVRequest, transfer: KvTransfer) -> _Leg | None:
        """Return the leg that a request is, which is begun with the first word of it; None: another one is."""
        leg = self._legs.get(transfer.transfer_id)
        if leg is not None:
            return leg if leg.request_id == request.request_id and not leg.request_over else None
        leg = self._legs[transfer.transfer_id] = _Leg(request.request_id)
        transfer_id = bytes.fromhex(transfer.transfer_id)
        self._agent.at_source(lambda source, now: source.begin(transfer_id, transfer.peer_incarnation, now))
        return leg

    def _end_leg(self, leg: _Leg, settled: LegSettled) -> None:
        del self._legs[settled.transfer_id.hex()]
        if leg.answer is not None:
            self._answers.append(AnswerDone(leg.answer, None if settled.delivered else settled.reason))

    def _not_needed(self, transfer: KvTransfer) -> None:
        """Tell the prefill engine of a transfer that nobody asks for any more, once."""
        if transfer.transfer_id in self._settled or transfer.transfer_id in self._askers:
            return
        self._settle(transfer.transfer_id)
        if self._parts.peers.find(transfer.peer_address) is None:
            return
        transfer_id, peer, incarnation = (
            bytes.fromhex(transfer.transfer_id),
            transfer.peer_address,
            transfer.peer_incarnation,
        )
        self._agent.at_target(lambda target, now: target.not_needed(transfer_id, peer, incarnation, now))

    def _settle(self, transfer_id: str) -> None:
        self._askers.pop(transfer_id, None)
        self._settled[transfer_id] = None
        if len(self._settled) > MAX_REMEMBERED:
            self._settled.popitem(last=False)
