"""An engine core of several that fails in the second half of a step, on one rank."""

from __future__ import annotations

import sys

from pagefleet_engine.engine_core.process import main
from pagefleet_engine.layers.moe.exchange import Delivery, ExchangeOfHalves
from pagefleet_engine.layers.moe.routing import Routes
from pagefleet_engine.ranks.shared_memory import SharedGroup
from torch import Tensor

LAST = 30
"""What the second half of the second rank still prepares."""


def run() -> None:
    """Serve until then."""
    prepare, prepared = ExchangeOfHalves.prepare, list[None]()

    def failing(self: ExchangeOfHalves, x_TD: Tensor, routes: Routes) -> Delivery:
        group = self._of_halves[1]._ranks  # type: ignore[attr-defined]
        assert isinstance(group, SharedGroup)
        if self._turns.half and group.index == 1:
            prepared.append(None)
            if len(prepared) > LAST:
                raise ValueError("the second half fails")
        return prepare(self, x_TD, routes)

    ExchangeOfHalves.prepare = failing  # type: ignore[method-assign]
    sys.exit(main())
