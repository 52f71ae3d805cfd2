"""The request table and a step's inputs against a builder that walks token by token, over random requests and steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows
from pagefleet_engine.worker.request_table import RequestTable, StagedWriter
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepInputs, StepRows
from pagefleet_engine.worker.transfer import HostUpload
from pagefleet_protocol.sampling_params import SamplingParams

from tests.example_counts import examples

CPU = torch.device("cpu")
NUM_SLOTS = 4
NUM_GROUPS = 2
BLOCK_SIZE = 3
MAX_MODEL_LEN = 40
SAMPLING = SamplingParams(temperature=0.0)


@dataclass
class Known:
    """What the test knows of a request."""

    tokens: list[int]
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NUM_GROUPS)])
    num_computed: int = 0


def new_row(name: str, tokens: list[int]) -> NewRow:
    return NewRow(name, tokens, len(tokens), SAMPLING, ())


def staged_table(num_slots: int = NUM_SLOTS) -> RequestTable:
    """A table on the CPU that is written as one on a GPU is."""
    table = RequestTable(num_slots, MAX_MODEL_LEN, BLOCK_SIZE, NUM_GROUPS, CPU)
    table._writer = StagedWriter(table._arena)
    return table


def prepare(builder: StepInputBuilder, rows: StepRows, num_rows: int, num_tokens: int) -> None:
    builder.prepare(torch.from_numpy(rows.row_table(num_rows, num_tokens)), num_tokens)


def step_rows(table: RequestTable, plan: list[ScheduledRow]) -> StepRows:
    rows = ScheduledRows.of(plan)
    return StepRows.of_plan(rows, table.extend(rows))


def check(inputs: StepInputs, rows: list[ScheduledRow], known: dict[str, Known]) -> None:
    """Compare with inputs made one token at a time."""
    tokens, positions, starts = [], [], [0]
    slots: list[list[int]] = [[] for _ in range(NUM_GROUPS)]
    for row in rows:
        request = known[row.request_id]
        for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens):
            tokens.append(request.tokens[position])
            positions.append(position)
            for group, table in enumerate(request.tables):
                slots[group].append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(tokens))
    seq_lens = [row.num_computed_tokens + row.num_new_tokens for row in rows]
    geometry = inputs.geometry
    assert inputs.entering.tolist() == tokens
    assert inputs.positions_T.tolist() == positions
    assert [slots_T.tolist() for slots_T in geometry.slot_mappings] == slots
    assert geometry.query_start_loc_S1.tolist() == starts
    assert geometry.seq_lens_S.tolist() == geometry.seq_lens == seq_lens
    assert geometry.query_lens == [row.num_new_tokens for row in rows]
    assert geometry.max_query_len == max(geometry.query_lens)
    for group, tables_SB in enumerate(geometry.block_tables):
        for row, length, entries in zip(rows, seq_lens, tables_SB.tolist(), strict=True):
            used = -(-length // BLOCK_SIZE)
            assert entries[:used] == known[row.request_id].tables[group][:used]
    assert geometry.query_start_loc_S1.dtype == geometry.seq_lens_S.dtype == torch.int32
    assert geometry.block_tables[0].dtype == torch.int32
    assert geometry.slot_mappings[0].dtype == torch.int64


@pytest.mark.parametrize("staged", [False, True])
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_inputs_equal_those_built_token_by_token(staged: bool, data: st.DataObject) -> None:
    table = staged_table() if staged else RequestTable(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_GROUPS, CPU)
    builder = StepInputBuilder(table, NUM_SLOTS, NUM_SLOTS * MAX_MODEL_LEN)
    known: dict[str, Known] = {}
    next_block, num_requests = 1, 0
    for _ in range(data.draw(st.integers(1, 12))):
        for name in data.draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []:
            table.remove(name)
            del known[name]
        while len(known) < NUM_SLOTS and (not known or data.draw(st.booleans())):
            tokens = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=MAX_MODEL_LEN - 12))
            name = f"r{num_requests}"
            num_requests += 1
            known[name] = Known(tokens[:])
            table.add(new_row(name, tokens))
        plan = []
        for name in data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, unique=True)):
            request = known[name]
            num_new = data.draw(st.integers(1, len(request.tokens) - request.num_computed))
            stop = request.num_computed + num_new
            num_missing = max(0, -(-stop // BLOCK_SIZE) - len(request.tables[0]))
            new_blocks = []
            for held in request.tables:
                new_blocks.append(list(range(next_block, next_block + num_missing)))
                next_block += num_missing
                held.extend(new_blocks[-1])
            plan.append(ScheduledRow(name, request.num_computed, num_new, new_blocks, stop == len(request.tokens)))
        rows = step_rows(table, plan)
        rows.check(table)
        table.flush(HostUpload())
        prepare(builder, rows, len(plan), rows.num_tokens)
        check(builder.inputs(rows), plan, known)
        assert rows.sampling_R.tolist() == [index for index, row in enumerate(plan) if row.samples]
        slots_R = rows.slots_S[rows.sampling_R]
        table.grow(slots_R)
        for row in plan:
            known[row.request_id].num_computed += row.num_new_tokens
            if row.samples:
                token = data.draw(st.integers(0, 999))
                slot = table._slots[row.request_id]
                table.tokens_SL[slot, len(known[row.request_id].tokens)] = token  # as the sampler does
                known[row.request_id].tokens.append(token)
    assert len(table) == len(known)


def test_a_batch_is_filled_up_with_rows_that_touch_nothing() -> None:
    table = RequestTable(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_GROUPS, CPU)
    table.add(new_row("r", [5, 6, 7]))
    plan = [ScheduledRow("r", 0, 3, ([4], [9]), True)]
    rows = step_rows(table, plan)
    builder = StepInputBuilder(table, NUM_SLOTS, 16)
    prepare(builder, rows, 3, 8)
    inputs = builder.view(3, 8, 8)
    assert inputs.entering.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert inputs.positions_T.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert inputs.geometry.query_start_loc_S1.tolist() == [0, 3, 4, 5]
    assert inputs.geometry.seq_lens_S.tolist() == [3, 0, 0]
    assert [slots.tolist() for slots in inputs.geometry.slot_mappings] == [
        [12, 13, 14, -1, -1, -1, -1, -1],
        [27, 28, 29, -1, -1, -1, -1, -1],
    ]
    assert inputs.geometry.query_lens is None


def test_a_reused_slot_has_no_blocks_of_its_former_request() -> None:
    table = RequestTable(1, 64, 4, 1, CPU)
    table.add(new_row("a", [1] * 12))
    table.extend(ScheduledRows.of([ScheduledRow("a", 0, 12, ([7, 8, 9],), True)]))
    assert table.remove("a") == table.add(new_row("b", [2]))
    slots = table.extend(ScheduledRows.of([ScheduledRow("b", 0, 1, ([5],), True)]))
    assert table.num_blocks(slots).tolist() == [1]
    assert table.block_tables_GSB[0, slots[0], 0] == 5


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (ScheduledRow("r", 0, 0, ([1],), False), "computes nothing"),
        (ScheduledRow("r", 0, 6, ([1, 2],), True), "not known"),
        (ScheduledRow("r", 0, 5, ([1, 2],), False), "samples exactly when"),
        (ScheduledRow("r", 0, 5, ([1],), True), "too few blocks"),
    ],
)
def test_a_plan_that_cannot_be_is_our_own_bug(row: ScheduledRow, what: str) -> None:
    table = RequestTable(1, 64, 4, 1, CPU)
    table.add(new_row("r", [1] * 5))
    rows = step_rows(table, [row])
    with pytest.raises(AssertionError, match=what):
        rows.check(table)


def test_tensors_of_a_step_keep_their_addresses() -> None:
    table = RequestTable(1, 64, 4, 1, CPU)
    table.add(new_row("r", [1] * 5))
    builder = StepInputBuilder(table, 1, 64)
    pointers = []
    for row in (ScheduledRow("r", 0, 3, ([1],), False), ScheduledRow("r", 3, 2, ([2],), True)):
        rows = step_rows(table, [row])
        prepare(builder, rows, 1, rows.num_tokens)
        inputs = builder.inputs(rows)
        pointers.append((inputs.entering.data_ptr(), inputs.geometry.block_tables[0].data_ptr()))
    assert pointers[0] == pointers[1]


def test_a_context_that_is_never_used_takes_no_memory() -> None:
    table = RequestTable(256, 1 << 20, 16, 1, CPU)
    slot = table.add(new_row("r", list(range(1_000))))
    assert table.tokens_SL[slot, :1_000].tolist() == list(range(1_000))
    assert table.tokens_SL.shape == (256, 1 << 20)
    assert np.count_nonzero(table.tokens_SL[slot, 1_000:2_000].numpy()) == 0
