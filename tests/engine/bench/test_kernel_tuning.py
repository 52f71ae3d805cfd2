"""The search for a launch table, by a clock of our own: what is tried, what is chosen, what the table then holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.bench.kernel_tuning import (
    TunedDevice,
    TuningSizes,
    TuningStep,
    fastest,
    product_candidates,
    run_steps,
    tuning_steps,
)
from pagefleet_engine.bench.plot import plot_bars
from pagefleet_kernels.tuning import LaunchTable, launch_table, table_from_json, table_to_json

KIB = 1024
SIZES = TuningSizes(
    head_dims=(32, 64),
    num_heads=4,
    num_kv_heads=2,
    prefill_len=20,
    decode_batch=2,
    decode_context=256,
    small_batches=(1, 8),
    inputs=32,
    outputs=48,
    rows=100,
    matrices=2,
    num_layers=2,
    long_context=128,
)


class Clock:
    """Calls what it is asked to time; the call of number `fastest` took the least."""

    def __init__(self, fastest: int) -> None:
        self.calls = 0
        self._fastest = fastest

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.calls += 1
        return 1.0 if self.calls - 1 == self._fastest else 2.0


def tuned(clock: Callable[[Callable[[], object]], float]) -> TunedDevice:
    return TunedDevice(
        device=torch.device("cpu"),
        architecture="sm_90",
        shared_bytes=227 * KIB,
        num_processors=132,
        free_bytes=2**24,
        clock=clock,
        does_not_fit=(MemoryError,),
        backend="torch",
    )


def step(name: str, clock: Callable[[Callable[[], object]], float]) -> TuningStep:
    return next(each for each in tuning_steps(tuned(clock), SIZES) if name in each.name)


@pytest.fixture
def table() -> LaunchTable:
    return launch_table("default")  # of no device, so that no tuning of one changes it


def test_the_fastest_tile_takes_its_place_and_the_rest_stays(table: LaunchTable) -> None:
    clock = Clock(fastest=5)  # the first call times the table as it is
    better, figures = step("decode attention, heads of 64", clock).search(table)
    assert figures["chosen"]["max_head_dim"] == 64
    assert better.decode[0].max_head_dim == 64
    assert better.decode[1:] == table.decode
    assert (better.prefill, better.matmul) == (table.prefill, table.matmul)
    assert clock.calls == 1 + figures["candidates"]
    assert figures["best_microseconds"] == 1000.0 < figures["before_microseconds"]


def test_a_smaller_head_gets_a_tile_of_its_own_and_the_table_can_be_read(table: LaunchTable) -> None:
    for head_dim in SIZES.head_dims:
        table, _ = step(f"prefill attention, heads of {head_dim}", Clock(3)).search(table)
    assert [tile.max_head_dim for tile in table.prefill] == [32, 64, 128, 256]
    assert table.measured
    assert table_from_json(table_to_json(table)) == table


def test_products_of_each_height_are_tuned_apart(table: LaunchTable) -> None:
    clock = Clock(fastest=2)
    better, figures = step("fp8 product, some rows", clock).search(table)
    candidates = product_candidates(64, 227 * KIB)
    assert better.matmul == (table.matmul[0], candidates[1], table.matmul[2])
    assert figures["candidates"] == len(candidates) == clock.calls - 1


@pytest.mark.parametrize("max_rows", [16, 64, 2**31])
def test_product_candidates_hold_the_guess_and_fit(max_rows: int, table: LaunchTable) -> None:
    tiles = product_candidates(max_rows, 227 * KIB)
    assert len(set(tiles)) == len(tiles) > 10
    assert {tile.max_rows for tile in tiles} == {max_rows}
    assert {(tile.num_stages, tile.block_m) for tile in tiles} >= {(3, min(tile.block_m for tile in tiles))}
    assert set(product_candidates(max_rows, 99 * KIB)) < set(tiles)


def test_contexts_are_cut_as_the_sum_over_batches_wants(table: LaunchTable) -> None:
    """One sequence gains by parts, eight do not: 132 programs are as many as one needs and eight take."""
    cuts: list[int] = []

    def clock(run: Any) -> float:
        cuts.append(run.args[1].parts)
        return float(len(cuts))

    better, figures = step("decode attention, parts", clock).search(table)
    first_of_eight = cuts.index(min(cuts), 1)
    assert cuts[:first_of_eight] == sorted(set(cuts[:first_of_eight]))
    assert figures["candidates"] == len({table.decode_programs, 132, 264, 396, 528, 792})
    assert better.decode_programs in (table.decode_programs, 132, 264, 396, 528, 792)
    assert figures["chosen"] == {"decode_programs": better.decode_programs}
    assert figures["best_microseconds"] <= figures["before_microseconds"]


def test_the_longest_part_is_what_a_long_context_among_many_takes_least_with(table: LaunchTable) -> None:
    better, figures = step("longest part", Clock(fastest=1)).search(table)
    assert table.longest_part == 4096
    assert better.longest_part == 2048
    assert figures["candidates"] == 4
    assert figures["chosen"] == {"longest_part": 2048}


def test_what_does_not_fit_is_passed_over() -> None:
    def milliseconds(candidate: int) -> float:
        if candidate > 2:
            raise MemoryError
        return 1.0 / candidate

    assert fastest([1, 2, 3], milliseconds, (MemoryError,)) == (2, 0.5)
    assert fastest([3, 4], milliseconds, (MemoryError,)) is None
    with pytest.raises(MemoryError):
        fastest([3], milliseconds, ())


def test_steps_build_on_each_other_and_each_is_told(table: LaunchTable) -> None:
    def search(number: int) -> Callable[[LaunchTable], tuple[LaunchTable, dict[str, Any]]]:
        def find(seen: LaunchTable) -> tuple[LaunchTable, dict[str, Any]]:
            return LaunchTable(**{**_fields(seen), "decode_programs": seen.decode_programs * number}), {"n": number}

        return find

    told: list[tuple[str, int]] = []
    steps = [TuningStep("double", search(2)), TuningStep("triple", search(3))]
    result, figures = run_steps(table, steps, lambda name, found, _: told.append((name, found.decode_programs)))
    assert told == [("double", 2 * table.decode_programs), ("triple", 6 * table.decode_programs)]
    assert result.decode_programs == 6 * table.decode_programs
    assert figures == {"double": {"n": 2}, "triple": {"n": 3}}


def test_every_step_runs_in_small(table: LaunchTable) -> None:
    """On the torch twins, to which tiles mean nothing, with a clock that likes what comes late."""
    times: Iterator[int] = itertools.count(-1, -1)
    names = [step.name for step in tuning_steps(tuned(Clock(0)), SIZES)]
    assert len(set(names)) == len(names) == 2 * len(SIZES.head_dims) + 2 + len(table.matmul) + len(table.packed)
    better, _ = step("fp8 product, many rows", lambda run: (run(), float(next(times)))[1]).search(table)
    assert better.matmul[-1] == product_candidates(2**31, 227 * KIB)[-1]


def test_bars_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kernels.png"
    panels = {
        "norm": {"1 x 4": {"pagefleet": 0.5, "torch": 0.25}, "2 x 4": {"pagefleet": 0.75}},
        "heads": {"1": {"pagefleet": 0.5}},
        "product": {"1": {"pagefleet": 0.5}},
    }
    plot_bars(panels, ("title", "share"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def _fields(table: LaunchTable) -> dict[str, Any]:
    return {name: getattr(table, name) for name in LaunchTable.__slots__}
