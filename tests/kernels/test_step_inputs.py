"""Step inputs, by kernel and twin, against a loop in plain Python."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.step_inputs import StepBuffers, prepare_step, scatter_writes

from tests.example_counts import examples

SLOTS, LENGTH, BLOCK_SIZE, GROUPS = 9, 96, 4, 2
BACKENDS: tuple[Backend, ...] = ("triton", "torch")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Row = tuple[int, int, int]  # slot, computed, new


def state() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(SLOTS * LENGTH, dtype=torch.int32).view(SLOTS, LENGTH) * 3 + 1
    blocks = torch.randperm(GROUPS * SLOTS * (LENGTH // BLOCK_SIZE)).to(torch.int32) + 5
    return tokens.to(DEVICE), blocks.view(GROUPS, SLOTS, -1).to(DEVICE)


def marked_buffers(max_rows: int = 12, max_tokens: int = 1300) -> StepBuffers:
    buffers = StepBuffers.allocate(GROUPS, max_rows, max_tokens, LENGTH // BLOCK_SIZE, DEVICE)
    for tensor in (buffers.token_ids_T, buffers.positions_T, buffers.slot_mappings_GT):
        tensor.fill_(-99)
    for tensor in (buffers.query_start_loc_R1, buffers.seq_lens_R, buffers.tables_GRB):
        tensor.fill_(-99)
    return buffers


def check(rows: Sequence[Row], num_tokens: int, backend: Backend) -> None:
    tokens_SL, tables_GSB = state()
    buffers = marked_buffers()
    packed, first = [], 0
    ids, positions, places = [], [], []
    for slot, computed, new in rows:
        packed.append((slot, computed, new, first))
        first += new
        for position in range(computed, computed + new):
            real = slot >= 0
            ids.append(int(tokens_SL[slot, position]) if real else 0)
            positions.append(position if real else 0)
            column, offset = divmod(position, BLOCK_SIZE)
            places.append([int(t[slot, column]) * BLOCK_SIZE + offset if real else -1 for t in tables_GSB])
    rest = num_tokens - first
    rows_R4 = torch.tensor(packed, dtype=torch.int32, device=DEVICE).view(-1, 4)
    prepare_step(tokens_SL, tables_GSB, rows_R4, BLOCK_SIZE, buffers, num_tokens, backend=backend)

    assert buffers.token_ids_T.tolist() == ids + [0] * rest + [-99] * (1300 - num_tokens)
    assert buffers.positions_T.tolist() == positions + [0] * rest + [-99] * (1300 - num_tokens)
    for group, slots_T in enumerate(buffers.slot_mappings_GT.tolist()):
        assert slots_T == [place[group] for place in places] + [-1] * rest + [-99] * (1300 - num_tokens)
    assert buffers.query_start_loc_R1[: len(rows) + 1].tolist() == [row[3] for row in packed] + [first]
    lens = [computed + new if slot >= 0 else 0 for slot, computed, new in rows]
    assert buffers.seq_lens_R.tolist() == lens + [-99] * (12 - len(rows))
    for row, ((slot, _, _), seq_len) in enumerate(zip(rows, lens, strict=True)):
        used = -(-seq_len // BLOCK_SIZE)
        assert torch.equal(buffers.tables_GRB[:, row, :used], tables_GSB[:, slot, :used])
    assert (buffers.tables_GRB[:, len(rows) :] == -99).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "num_tokens"),
    [
        ([(3, 17, 1), (0, 0, 1), (8, 95, 1)], 3),
        ([(3, 17, 1), (0, 4, 1), (-1, 0, 1), (-1, 0, 1)], 4),
        ([(2, 0, 96)], 128),
        ([(1, 5, 1), (4, 8, 30), (7, 0, 1), (5, 0, 2)], 34),
        ([(1, 5, 2), (-1, 0, 0)], 2),
        ([(6, 0, 96), (0, 3, 90), (-1, 0, 1)], 1100),  # more than one tile of tokens
    ],
    ids=["decode", "padded decode", "prefill and rest", "mixed", "row without tokens", "tiles"],
)
def test_inputs_of_a_step(rows: Sequence[Row], num_tokens: int, backend: Backend) -> None:
    torch.manual_seed(0)
    check(rows, num_tokens, backend)


@settings(deadline=None, max_examples=examples(20))
@given(data=st.data(), backend=st.sampled_from(BACKENDS))
def test_inputs_of_any_step(data: st.DataObject, backend: Backend) -> None:
    rows: list[Row] = []
    for slot in data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]:
        computed = data.draw(st.integers(0, LENGTH - 1))
        rows.append((slot, computed, data.draw(st.sampled_from([1, 1, min(7, LENGTH - computed), LENGTH - computed]))))
    rows += [(-1, 0, 1)] * data.draw(st.integers(0, 2))
    check(rows, sum(new for _, _, new in rows) + data.draw(st.integers(0, 5)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_staged_writes_land_and_nothing_else_changes(backend: Backend) -> None:
    random.seed(1)
    values = torch.arange(5000, dtype=torch.int32, device=DEVICE) + 7
    arena = torch.full((9000,), -1, dtype=torch.int32, device=DEVICE)
    expected = arena.clone()
    writes, destination, source = [], 3, 0
    for length in (1, 0, 2049, 17, 512, 513, 1):
        writes.append((destination, source, length))
        expected[destination : destination + length] = values[source : source + length]
        destination += length + random.randrange(5)
        source += length
    random.shuffle(writes)
    scatter_writes(arena, torch.tensor(writes, dtype=torch.int64, device=DEVICE), values, backend=backend)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_writes_change_nothing(backend: Backend) -> None:
    arena = torch.ones(4, dtype=torch.int32, device=DEVICE)
    none = torch.empty((0, 3), dtype=torch.int64, device=DEVICE)
    scatter_writes(arena, none, arena.new_empty(0), backend=backend)
    assert arena.tolist() == [1, 1, 1, 1]


def test_misfits_are_refused() -> None:
    tokens, tables = state()
    rows = torch.zeros((2, 4), dtype=torch.int32)
    buffers = marked_buffers(max_rows=2, max_tokens=8)
    with pytest.raises(UnsupportedShapeError, match="8"):
        prepare_step(tokens, tables, rows, BLOCK_SIZE, buffers, 9)
    with pytest.raises(UnsupportedShapeError, match="R 1 to 2"):
        prepare_step(tokens, tables, rows.repeat(2, 1), BLOCK_SIZE, buffers, 4)
    with pytest.raises(UnsupportedShapeError, match="R 1 to 2"):
        prepare_step(tokens, tables, rows[:0], BLOCK_SIZE, buffers, 4)
    with pytest.raises(UnsupportedShapeError, match="equal S"):
        prepare_step(tokens[:3], tables, rows, BLOCK_SIZE, buffers, 2)
    with pytest.raises(UnsupportedShapeError, match="groups"):
        prepare_step(tokens, tables[:1], rows, BLOCK_SIZE, buffers, 2)
    with pytest.raises(UnsupportedShapeError, match=r"\[W, 3\]"):
        scatter_writes(tokens.view(-1), rows.long(), tokens.view(-1))
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        scatter_writes(tokens[:, 0], torch.zeros((1, 3), dtype=torch.int64), tokens.view(-1))
