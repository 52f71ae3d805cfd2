"""Whose the open outputs are: a core may serve several API processes, and each hears of its own requests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagefleet_engine.engine_core.messages import RequestOutput


class Askers:
    """Of each open output, the number of the process that asked for it.

    Args:
        num: processes that may ask. One is noted nowhere.
    """

    def __init__(self, num: int = 1) -> None:
        self.num = num
        self._askers: dict[str, int] = {}
        self._gone: dict[int, int] = {}
        """Of a process, the number of the last start that has ended."""

    def begin(self, output_ids: Sequence[str], asker: int) -> None:
        """Note who asks for outputs. Ids are different for all processes, and all starts of these."""
        if self.num > 1:
            self._askers.update(dict.fromkeys(output_ids, asker))

    def is_gone(self, request_id: str, asker: int) -> bool:
        """Whether the start of a process that sent a request has ended: its last messages are read after the news."""
        gone = self._gone.get(asker)
        return gone is not None and start_of(request_id) <= gone

    def share_out(self, outputs: list[RequestOutput]) -> Mapping[int, list[RequestOutput]]:
        """Return what each process is to be told, if anything."""
        if self.num == 1:
            return {0: outputs} if outputs else {}
        shares: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            of = self._askers.get if output.finish_reason is None else self._askers.pop
            if (asker := of(output.request_id, None)) is not None:
                shares.setdefault(asker, []).append(output)
        return shares

    def forget(self, asker: int, start: int) -> list[str]:
        """Return the open outputs of a process whose start with this number is gone; nothing more is told of them."""
        self._gone[asker] = start
        gone = [output_id for output_id, own in self._askers.items() if own == asker]
        for output_id in gone:
            del self._askers[output_id]
        return gone


def start_of(request_id: str) -> int:
    """Return the number of the start that asks, which an id ends with as `#3.17` (`ApiSeat.mark`); 0: the first one."""
    start, dot, _ = request_id.rpartition("#")[2].partition(".")
    return int(start) if dot and start.isdecimal() else 0
