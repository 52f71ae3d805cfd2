"""The requests that the worker holds: their tokens and block tables on the device, one slot per request.

A plan is applied as a difference, so a decoding step touches a few numbers per request. Slots are reused; the order of
a step's rows is the plan's, not the slots'.

Shapes: S slots, L tokens per slot, G KV groups, B blocks per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.step_inputs import scatter_writes
from torch import Tensor

from pagefleet_engine.core.step import Int64Array, NewRow, ScheduledRows
from pagefleet_engine.worker.transfer import Upload


class ArenaWriter(Protocol):
    """Writes ranges of a flat int32 tensor on the device."""

    def put(self, start: int, values: Sequence[int]) -> None:
        """Write `values` from index `start` on, at the latest with the next `flush`."""
        ...

    def flush(self, upload: Upload) -> None:
        """Let the device see everything that was put."""
        ...


class HostWriter:
    """Writes at once, where the device is the host."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena.numpy()

    def put(self, start: int, values: Sequence[int]) -> None:
        """See ArenaWriter."""
        self._arena[start : start + len(values)] = values

    def flush(self, upload: Upload) -> None:
        """See ArenaWriter; nothing is left to do."""


class StagedWriter:
    """Collects on the host; a flush is one copy and one kernel, whatever was put."""

    def __init__(self, arena: Tensor, kernels: Backend | None = None) -> None:
        self._arena = arena
        self._kernels = kernels
        self._starts: list[int] = []
        self._values: list[NDArray[np.int32]] = []

    def put(self, start: int, values: Sequence[int]) -> None:
        """See ArenaWriter."""
        self._starts.append(start)
        self._values.append(np.asarray(values, dtype=np.int32))

    def flush(self, upload: Upload) -> None:
        """See ArenaWriter."""
        if not self._starts:
            return
        # Taken first: if the device has no memory for them, their requests end, and slots may be written again.
        starts, parts, self._starts, self._values = self._starts, self._values, [], []
        lengths = np.array([len(values) for values in parts], dtype=np.int64)
        writes_W3 = np.stack([np.array(starts, dtype=np.int64), np.cumsum(lengths) - lengths, lengths], axis=1)
        writes, values = upload.send([writes_W3, np.concatenate(parts)])
        scatter_writes(self._arena, writes, values, backend=self._kernels)


class RequestTable:
    """Token rows and block tables of up to `num_slots` requests."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        kernels: Backend | None = None,
    ) -> None:
        """`kernels` forces Triton or the twins; Triton on a CPU also stages writes, as on a GPU."""
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self._max_model_len = max_model_len
        self._arena = _zeros(num_slots * (max_model_len + num_groups * self.max_blocks), device)
        num_tokens = num_slots * max_model_len
        self.tokens_SL = self._arena[:num_tokens].view(num_slots, max_model_len)
        """int32: prompt and output of each slot, as far as the device has them."""
        self.block_tables_GSB = self._arena[num_tokens:].view(num_groups, num_slots, self.max_blocks)
        """int32."""
        on_host = device.type == "cpu" and kernels != "triton"
        self._writer: ArenaWriter = HostWriter(self._arena) if on_host else StagedWriter(self._arena, kernels)
        self._first_entry = [
            [num_tokens + (group * num_slots + slot) * self.max_blocks for slot in range(num_slots)]
            for group in range(num_groups)
        ]
        self._num_blocks_GS = np.zeros((num_groups, num_slots), dtype=np.int64)
        self._num_tokens_S = np.zeros(num_slots, dtype=np.int64)
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def add(self, new: NewRow) -> int:
        """Take a request in; returns its slot."""
        assert new.request_id not in self._slots, f"{new.request_id} is held already"
        num_tokens = len(new.token_ids)
        assert num_tokens <= self._max_model_len, f"{num_tokens} tokens in a context of {self._max_model_len}"
        slot = self._free.pop()
        self._slots[new.request_id] = slot
        self._writer.put(slot * self._max_model_len, new.token_ids)
        self._num_blocks_GS[:, slot] = 0
        self._num_tokens_S[slot] = num_tokens
        return slot

    def remove(self, request_id: str) -> int:
        """Let a request go; returns the slot it had."""
        slot = self._slots.pop(request_id)
        self._free.append(slot)
        return slot

    def extend(self, rows: ScheduledRows) -> Int64Array:
        """Append the rows' new blocks; returns the rows' slots, in their order."""
        slots = [self._slots[request_id] for request_id in rows.request_ids]
        for index, blocks in rows.new_blocks.items():
            self._extend_slot(slots[index], blocks, rows.request_ids[index])
        return np.array(slots, dtype=np.int64)

    def num_blocks(self, slots_S: Int64Array) -> Int64Array:
        """Length of these slots' shortest table."""
        num_blocks_S: Int64Array = self._num_blocks_GS[:, slots_S].min(0)
        return num_blocks_S

    def num_tokens(self, slots_S: Int64Array) -> Int64Array:
        """Tokens of these slots that the device has, or will have before it comes to the next step."""
        num_tokens_S: Int64Array = self._num_tokens_S[slots_S]
        return num_tokens_S

    def grow(self, slots_R: Int64Array) -> None:
        """These distinct slots sample a token, which the device puts after their last."""
        self._num_tokens_S[slots_R] += 1

    def shrink(self, slots_R: Int64Array) -> None:
        """These slots, which were to sample a token, do not."""
        self._num_tokens_S[slots_R] -= 1

    def append(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Put tokens after those that a request has; returns its slot."""
        slot = self._slots[request_id]
        num_tokens = int(self._num_tokens_S[slot])
        stop = num_tokens + len(token_ids)
        assert stop <= self._max_model_len, f"{stop} tokens in a context of {self._max_model_len}"
        self._writer.put(slot * self._max_model_len + num_tokens, token_ids)
        self._num_tokens_S[slot] = stop
        return slot

    def flush(self, upload: Upload) -> None:
        """Bring what was added, appended and extended to the device."""
        self._writer.flush(upload)

    def _extend_slot(self, slot: int, new_blocks: Sequence[Sequence[int]], request_id: str) -> None:
        for group, blocks in enumerate(new_blocks):
            held = int(self._num_blocks_GS[group, slot])
            stop = held + len(blocks)
            assert stop <= self.max_blocks, f"{request_id} has {stop} blocks, a context {self.max_blocks}"
            self._writer.put(self._first_entry[group][slot] + held, blocks)
            self._num_blocks_GS[group, slot] = stop


def _zeros(size: int, device: torch.device) -> Tensor:
    if device.type == "cpu":  # numpy's zeros take no memory before something is written there
        return torch.from_numpy(np.zeros(size, dtype=np.int32))
    return torch.zeros(size, dtype=torch.int32, device=device)
