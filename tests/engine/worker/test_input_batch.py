"""The vectorised step inputs against a builder that walks token by token, over random requests and steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.step import NewRow, ScheduledRow
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_engine.worker.input_batch import InputBatch
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepInputs

NUM_SLOTS = 4
BLOCK_SIZE = 3
MAX_MODEL_LEN = 40
SAMPLING = SamplingParams(temperature=0.0)


@dataclass
class Known:
    """What the test knows of a request."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


def new_row(name: str, tokens: list[int]) -> NewRow:
    return NewRow(name, tokens, len(tokens), SAMPLING, ())


def check(inputs: StepInputs, rows: list[ScheduledRow], known: dict[str, Known]) -> None:
    """Compare with inputs made one token at a time."""
    tokens, positions, slots, starts, last = [], [], [], [0], []
    for row in rows:
        request = known[row.request_id]
        for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens):
            tokens.append(request.tokens[position])
            positions.append(position)
            slots.append(request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(tokens))
        if row.samples:
            last.append(len(tokens) - 1)
    seq_lens = [row.num_computed_tokens + row.num_new_tokens for row in rows]
    width = max(-(-length // BLOCK_SIZE) for length in seq_lens)
    tables = [(known[row.request_id].blocks + [0] * width)[:width] for row in rows]
    geometry = inputs.geometry
    assert inputs.token_ids_T.tolist() == tokens
    assert inputs.positions_T.tolist() == positions
    assert geometry.slot_mappings[0].tolist() == slots
    assert geometry.query_start_loc_S1.tolist() == inputs.first_token_S1.tolist() == starts
    assert geometry.seq_lens_S.tolist() == geometry.seq_lens == seq_lens
    assert geometry.query_lens == [row.num_new_tokens for row in rows]
    assert geometry.block_tables[0].tolist() == tables
    assert inputs.sampling_rows.tolist() == [index for index, row in enumerate(rows) if row.samples]
    assert inputs.last_token_R.tolist() == last
    assert geometry.query_start_loc_S1.dtype == geometry.seq_lens_S.dtype == torch.int32
    assert geometry.block_tables[0].dtype == torch.int32
    assert geometry.slot_mappings[0].dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_inputs_equal_those_built_token_by_token(data: st.DataObject) -> None:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE)
    builder = StepInputBuilder(batch, NUM_SLOTS, NUM_SLOTS * MAX_MODEL_LEN, torch.device("cpu"))
    known: dict[str, Known] = {}
    next_block, num_requests = 1, 0
    for _ in range(data.draw(st.integers(1, 12))):
        for name in data.draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []:
            batch.remove(name)
            del known[name]
        while len(known) < NUM_SLOTS and (not known or data.draw(st.booleans())):
            tokens = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=MAX_MODEL_LEN - 12))
            name = f"r{num_requests}"
            num_requests += 1
            known[name] = Known(tokens[:])
            batch.add(new_row(name, tokens))
        rows = []
        for name in data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, unique=True)):
            request = known[name]
            num_new = data.draw(st.integers(1, len(request.tokens) - request.num_computed))
            stop = request.num_computed + num_new
            num_missing = max(0, -(-stop // BLOCK_SIZE) - len(request.blocks))
            new_blocks = list(range(next_block, next_block + num_missing))
            next_block += num_missing
            rows.append(ScheduledRow(name, request.num_computed, num_new, (new_blocks,), stop == len(request.tokens)))
            request.blocks += new_blocks
        slots = batch.extend_tables(rows)
        inputs = builder.build(rows, slots)
        check(inputs, rows, known)
        sampled = data.draw(st.lists(st.integers(0, 999), min_size=len(rows), max_size=len(rows)))
        batch.append(slots[inputs.sampling_rows], [sampled[index] for index in inputs.sampling_rows])
        for row, token in zip(rows, sampled, strict=True):
            known[row.request_id].num_computed += row.num_new_tokens
            if row.samples:
                known[row.request_id].tokens.append(token)
    assert len(batch) == len(known)


def test_rows_widen_and_keep_what_they_hold() -> None:
    batch = InputBatch(2, 10_000, 16)
    short = list(range(50))
    long = list(range(7_000))
    first = batch.add(new_row("short", short))
    second = batch.add(new_row("long", long))
    batch.append(np.array([second, first]), [77, 88])
    for slot, tokens in ((first, [*short, 88]), (second, [*long, 77])):
        at = np.arange(len(tokens))
        assert batch.tokens_at(np.full(len(tokens), slot), at).tolist() == tokens
    assert batch.num_tokens(np.array([first, second])).tolist() == [51, 7_001]


def test_rows_widen_when_a_sampled_token_needs_it() -> None:
    batch = InputBatch(1, 5_000, 16)
    slot = np.array([batch.add(new_row("r", [1] * 2_048))])
    batch.append(slot, [9])
    assert batch.tokens_at(slot, np.array([2_048])).tolist() == [9]


def test_a_reused_slot_has_no_blocks_of_its_former_request() -> None:
    batch = InputBatch(1, 64, 4)
    batch.add(new_row("a", [1] * 12))
    batch.extend_tables([ScheduledRow("a", 0, 12, ([7, 8, 9],), True)])
    assert batch.remove("a") == batch.add(new_row("b", [2]))
    slots = batch.extend_tables([ScheduledRow("b", 0, 1, ([5],), True)])
    assert batch.block_tables(slots, 4).tolist() == [[5, 0, 0, 0]]


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
    batch = InputBatch(1, 64, 4)
    batch.add(new_row("r", [1] * 5))
    builder = StepInputBuilder(batch, 1, 64, torch.device("cpu"))
    slots = batch.extend_tables([row])
    with pytest.raises(AssertionError, match=what):
        builder.build([row], slots)


def test_tensors_of_a_step_keep_their_addresses() -> None:
    batch = InputBatch(1, 64, 4)
    batch.add(new_row("r", [1] * 5))
    builder = StepInputBuilder(batch, 1, 64, torch.device("cpu"))
    first_row, second_row = ScheduledRow("r", 0, 3, ([1],), False), ScheduledRow("r", 3, 2, ([2],), True)
    first = builder.build([first_row], batch.extend_tables([first_row]))
    second = builder.build([second_row], batch.extend_tables([second_row]))
    assert first.token_ids_T.data_ptr() == second.token_ids_T.data_ptr()
    assert first.geometry.block_tables[0].data_ptr() == second.geometry.block_tables[0].data_ptr()
