"""Which slots of all ranks have which expert of a layer, where that changes with load, and what each was wanted.

Shapes: T tokens of the step, K experts of a token, E experts, C places that an expert has at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagefleet_engine.layers.moe.expert_places import EMPTY, first_places
from pagefleet_engine.layers.moe.routing import NOWHERE, Routes


class ExpertMap:
    """The same on all ranks; tensors are changed in place, so that graphs may hold them.

    Attributes:
        slots: of each rank.
        held: per slot, the expert in it or EMPTY.
        wanted_E: int64, how many rows of this rank each expert was chosen by since whoever reads it set it to 0.
    """

    def __init__(self, num_experts: int, slots: Sequence[range], device: torch.device) -> None:
        self.slots = tuple(slots)
        self.held: tuple[int, ...] = ()
        self.wanted_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._slots_EC = torch.zeros(num_experts, len(slots), dtype=torch.int32, device=device)
        self._counts_E = torch.ones(num_experts, dtype=torch.int32, device=device)
        self.hold(first_places(num_experts, slots))

    def hold(self, held: Sequence[int]) -> None:
        """The slots have other experts from now on; each expert is in one at least."""
        self.held = tuple(held)
        places: list[list[int]] = [[] for _ in range(len(self.wanted_E))]
        for slot, expert in enumerate(held):
            if expert != EMPTY:
                places[expert].append(slot)
        most = self._slots_EC.shape[1]
        self._slots_EC.copy_(torch.tensor([own + [NOWHERE] * (most - len(own)) for own in places]))
        self._counts_E.copy_(torch.tensor([len(own) for own in places]))

    def place(self, routes: Routes) -> Routes:
        """From experts to slots, and count; rows take turns among an expert's places."""
        goes_TK = routes.experts_TK != NOWHERE
        experts_TK = routes.experts_TK.clamp_min(0).long()
        self.wanted_E.index_add_(0, experts_TK.flatten(), goes_TK.flatten().long())
        row_T1 = torch.arange(len(experts_TK), device=experts_TK.device)[:, None]
        slots_TK = self._slots_EC[experts_TK, row_T1 % self._counts_E[experts_TK]]
        return Routes(routes.weights_TK, slots_TK.masked_fill_(~goes_TK, NOWHERE))
