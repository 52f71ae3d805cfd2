"""Attention and experts in bfloat16 in tiles of AMX, by what its instructions are said to do, against torch.

On a processor that has them, the tests of all instruction sets try the instructions themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagefleet_kernels.native.library import FUNCTIONS, Library
from pagefleet_kernels.score_rule import ScoreRule

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries
from tests.kernels.test_native_attention import check, draw_batch, run
from tests.kernels.test_native_experts import GATES, Layer, routes
from tests.kernels.twins import HERE, TILES, compile_twin

SETS = native_libraries()

pytestmark = pytest.mark.skipif(not SETS or shutil.which("g++") is None, reason="needs compiled kernels and g++")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Library]:
    """The kernels by tiles, and by vectors of as many numbers, which the compiler makes of shorter ones."""
    flags = ("-O1", "-Wno-psabi", "-DLANES=16", f'-DPAIRS="{HERE / "pair_twin.h"}"', "-DISA=vectors", "-DTILED=tiles")
    units = [(source, (TILES,)) for source in ("attention", "experts", "dense")]
    made = compile_twin(tmp_path_factory.mktemp("pairs"), units, *flags)
    by_either = ("room", "part", "experts_room", "dense_bytes", "lay_out_dense")

    def library(name: str) -> Library:
        builds = {**dict.fromkeys(by_either, "vectors"), **dict.fromkeys(("attend", "run_experts"), name)}
        found = {each: FUNCTIONS[each]((f"{each}_{of}", made)) for each, of in builds.items()}
        return cast(Library, SimpleNamespace(plan_attention=SETS[0].plan_attention, **found))

    return library("tiles"), library("vectors")


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_attention_of_any_rule_and_shape(
    twin: tuple[Library, Library], make_batch: Callable[..., Any], data: st.DataObject
) -> None:
    batch, rule = draw_batch(data.draw, make_batch, torch.bfloat16)
    check(twin[0], batch, rule, data.draw(st.integers(1, 3)))


@pytest.mark.parametrize("new", [5, 16, 17, 33, 96, 130])
@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 64), ((7, 1), 128), ((4, 2), 80), ((2, 2), 20)])
def test_attention_moves_by_a_rounding_of_its_sums_alone(
    twin: tuple[Library, Library], make_batch: Callable[..., Any], new: int, heads: tuple[int, int], head_dim: int
) -> None:
    """Every height of a tile, one beside another or not; some keys are of a last tile that is not full."""
    batch = make_batch([(new, new + 301), (1, 40)], heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    one, other = (run(library, batch, ScoreRule(scale=batch.scale)) for library in twin)
    torch.testing.assert_close(one.float(), other.float(), rtol=8e-3, atol=2e-3)


def test_what_is_no_number_stays_with_its_own_row(
    twin: tuple[Library, Library], make_batch: Callable[..., Any]
) -> None:
    batch, rule = make_batch([(40, 90)], dtype=torch.bfloat16), ScoreRule(scale=0.1)
    clean = run(twin[0], batch, rule)
    batch.q_TNH[3, 1] = float("nan")
    out = run(twin[0], batch, rule)
    assert out[3, 1].isnan().all()
    out[3, 1] = clean[3, 1]
    assert torch.equal(out, clean)


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.integers(0, 120),
    sizes=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    experts=st.integers(2, 5),
    gate=st.sampled_from(GATES),
    is_biased=st.booleans(),
)
def test_each_row_gets_what_its_experts_give(
    twin: tuple[Library, Library], rows: int, sizes: tuple[int, int], experts: int, gate: Any, is_biased: bool
) -> None:
    """Of few rows and of many, of inputs that end within a tile, and not."""
    hidden, width = 16 * sizes[0], 16 * sizes[1]
    layer = Layer(twin[0], experts, hidden, width, gate, torch.bfloat16)
    if is_biased:
        layer.add_biases()
    x = torch.randn(rows, 2 * hidden, generator=torch.Generator().manual_seed(1)).bfloat16()[:, :hidden]
    where = routes(rows, min(experts - 1, 3), experts)
    out = layer.packed(x, *where)
    torch.testing.assert_close(out.float(), layer.exact(x, *where), rtol=2e-2, atol=2e-2)
