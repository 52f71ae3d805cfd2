"""Whole experts over copies of the model, which have tokens of their own: what each gets is what one rank would."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.core.step import ExpertLoad
from pagefleet_engine.layers.moe.balanced import Balance
from pagefleet_engine.layers.moe.exchange import OwnExperts, own_experts
from pagefleet_engine.layers.moe.expert_places import busiest_over_mean, place_experts
from pagefleet_engine.layers.moe.routing import NOWHERE, Routes
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model
from pagefleet_engine.ranks.group import Alone, RankGroup, gloo_group
from pagefleet_engine.ranks.parallelism import All2All
from pagefleet_engine.ranks.turns import Halves, Turns
from pagefleet_engine.worker.expert_balance import ExpertBalancer
from pagefleet_engine.worker.forward import NoTokens
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.packed_checkpoints import Packed, packed_checkpoint
from tests.fakes.paged_step import paged_step
from tests.fakes.quantized_checkpoints import Recipe, mxfp4_checkpoint, quantize_checkpoint
from tests.fakes.ranks import in_memory, on_ranks
from tests.grids import each_once

Make = Callable[..., Path]
CPU = torch.device("cpu")
BACKENDS: tuple[All2All, ...] = ("allgather_reducescatter", "all2allv")
NUM_EXPERTS, TOP_K, HIDDEN = 7, 3, 5
ORDERED = Packed("gptq", zeros=True, ordered=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def placed(backend: All2All, *, data: RankGroup, tensor: RankGroup | None = None) -> Placement:
    return Placement(
        torch.float32,
        CPU,
        use_kernels=False,
        tensor=tensor or Alone(),
        data=data,
        expert_parallel=True,
        all2all_backend=backend,
    )


def routed(num_rows: int, dice: torch.Generator) -> tuple[Tensor, Routes]:
    """Rows and where they go; some nowhere."""
    liking = torch.rand(num_rows, NUM_EXPERTS, generator=dice)
    experts = liking.topk(TOP_K, -1).indices.to(torch.int32)
    experts[::4] = NOWHERE
    x = torch.randn(num_rows, HIDDEN, generator=dice)
    return x, Routes(torch.rand(num_rows, TOP_K, generator=dice), experts)


def through(share: OwnExperts, x_TD: Tensor, routes: Routes) -> Tensor:
    """Experts that multiply by their number plus one."""
    (own,), sent = share.experts.ranges, share.exchange.prepare(x_TD, routes)
    assert ((sent.routes.experts_TK < len(own)) & (sent.routes.experts_TK >= NOWHERE)).all()
    return sent.finalize(sent.x_RD * _factors(sent.routes, own.start)[:, None])


def _factors(routes: Routes, first: int = 0) -> Tensor:
    goes = routes.experts_TK != NOWHERE
    return (routes.weights_TK * (routes.experts_TK + first + 1) * goes).sum(-1)


@pytest.mark.parametrize("steps", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_steps_with_ranks_that_have_no_tokens(backend: All2All, steps: int) -> None:
    def rank(ranks: RankGroup) -> float:
        share = own_experts(NUM_EXPERTS, placed(backend, data=ranks))
        dice, generator, worst = random.Random(ranks.index), torch.Generator().manual_seed(ranks.index), 0.0
        for _ in range(steps):
            x_TD, routes = routed(dice.choice((0, 0, 1, 2, 9)), generator)
            out_TD = through(share, x_TD, routes)
            assert out_TD.shape == x_TD.shape
            if len(x_TD):
                worst = max(worst, float((out_TD - x_TD * _factors(routes)[:, None]).abs().max()))
        return worst

    assert max(in_memory(2, rank)) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_of_several_tensor_ranks(backend: All2All) -> None:
    """Four ranks have the experts once among them; the two of a copy have the same rows, and add up what they got."""
    stores = {name: HashStore() for name in ("tensor 0", "tensor 1", "data 0", "data 1")}

    def rank(world: RankGroup) -> float:
        copy, number = divmod(world.index, 2)
        tensor, _ = gloo_group(stores[f"tensor {copy}"], number, 2, timedelta(seconds=60))
        data, _ = gloo_group(stores[f"data {number}"], copy, 2, timedelta(seconds=60))
        share = own_experts(NUM_EXPERTS, placed(backend, data=data, tensor=tensor))
        x_TD, routes = routed(6 + copy, torch.Generator().manual_seed(copy))
        sums_TD = tensor.all_reduce(through(share, x_TD, routes).contiguous())
        return float((sums_TD - x_TD * _factors(routes)[:, None]).abs().max())

    assert max(on_ranks(4, rank)) < 1e-5


def load(folder: Path, place: Placement) -> Model:
    return load_model(folder, read_arch(folder), place, "auto", 0)


@torch.inference_mode()
def logits(model: Model, prompts: list[Tensor]) -> list[Tensor]:
    """Of each prompt in a step of its own; where it is empty, of a step without tokens."""
    found = []
    for prompt in prompts:
        if not len(prompt):
            model.forward(prompt, prompt, NoTokens())
            continue
        step = DenseStep([(DenseSequence(), len(prompt))])
        found.append(model.logits(model.forward(prompt, torch.arange(len(prompt)), step)))
    return found


@pytest.mark.parametrize(
    ("copies", "backend"),
    each_once(
        [("mixtral", 2), ("qwen2_moe", 3), ("granitemoe", 2), ("qwen3_moe", 4), ("deepseek_v3", 3), ("llama4_text", 2)],
        BACKENDS,
    ),
)
def test_each_copy_computes_what_one_rank_would(
    copies: tuple[str, int], backend: All2All, make_checkpoint: Make
) -> None:
    """Prompts of different lengths on each, and steps in which some have none."""
    family, size = copies
    folder = make_checkpoint(family)
    lengths = [[7, 0, 3, 40], [1, 5, 0, 0], [0, 0, 2, 9], [3, 1, 0, 0]]
    prompts = [[torch.arange(3, 3 + length) for length in own] for own in lengths]
    alone = load(folder, Placement(torch.float32, CPU, use_kernels=False))

    def rank(ranks: RankGroup) -> list[Tensor]:
        return logits(load(folder, placed(backend, data=ranks)), prompts[ranks.index])

    found: list[list[Tensor]] = on_ranks(size, rank)
    for own, got in zip(prompts, found, strict=False):
        for expected, one in zip(logits(alone, [prompt for prompt in own if len(prompt)]), got, strict=True):
            assert (one - expected).abs().max() < 1e-4


@torch.inference_mode()
def greedy(model: Model, prompts: list[Tensor], num_tokens: int) -> Tensor:
    """Likeliest tokens [prompts, num_tokens] of texts side by side, or nothing after as many steps without any."""
    texts, sequences, pending = list(prompts), [DenseSequence() for _ in prompts], list(prompts)
    for _ in range(num_tokens):
        if not pending:
            model.forward(torch.arange(0), torch.arange(0), NoTokens())
            continue
        positions = [torch.arange(len(text) - len(new), len(text)) for text, new in zip(texts, pending, strict=True)]
        step = DenseStep([(sequence, len(new)) for sequence, new in zip(sequences, pending, strict=True)])
        hidden = model.forward(torch.cat(pending), torch.cat(positions), step)
        ends = torch.tensor([len(new) for new in pending]).cumsum(0) - 1
        pending = list(model.logits(hidden[ends]).argmax(-1, keepdim=True))
        texts = [torch.cat(pair) for pair in zip(texts, pending, strict=True)]
    return torch.stack([text[-num_tokens:] for text in texts]) if texts else torch.empty(0, num_tokens)


@pytest.mark.parametrize(
    ("family", "size"),
    [("granitemoe", 2), ("qwen3_moe", 4), ("deepseek_v3", 2), ("deepseek_v3", 4), ("mixtral", 4), ("llama4_text", 2)],
)
def test_greedy_tokens_over_tensor_ranks_are_those_of_one_rank(family: str, size: int, make_checkpoint: Make) -> None:
    folder = make_checkpoint(family)
    prompts = [torch.arange(3 + length, 3 + 2 * length) for length in (7, 40, 1)]
    alone = load(folder, Placement(torch.float32, CPU, use_kernels=False))

    def rank(ranks: RankGroup) -> Tensor:
        return greedy(load(folder, placed(BACKENDS[0], data=Alone(), tensor=ranks)), prompts, 64)

    expected = greedy(alone, prompts, 64)
    assert all(torch.equal(tokens, expected) for tokens in on_ranks(size, rank))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("family", "size"), [("granitemoe", 2), ("qwen3_moe", 4)])
def test_greedy_tokens_over_copies_are_those_of_one_rank(
    family: str, size: int, backend: All2All, make_checkpoint: Make
) -> None:
    """One of four copies has no texts."""
    folder, lengths = make_checkpoint(family), [[7, 40], [1, 5, 12], [], [3]]
    prompts = [[torch.arange(3 + length, 3 + 2 * length) for length in own] for own in lengths]
    alone = load(folder, Placement(torch.float32, CPU, use_kernels=False))

    def rank(ranks: RankGroup) -> Tensor:
        return greedy(load(folder, placed(backend, data=ranks)), prompts[ranks.index], 12)

    for own, tokens in zip(prompts, on_ranks(size, rank), strict=False):
        assert torch.equal(tokens, greedy(alone, own, 12))


@torch.inference_mode()
def logits_in_halves(model: Model, turns: Turns, prompt: Tensor) -> Tensor:
    """Of a prompt whose second half attends to the first."""
    sequence, cut, positions = DenseSequence(), len(prompt) // 2, torch.arange(len(prompt))

    def half(tokens: slice) -> Callable[[], Tensor]:
        own = prompt[tokens]
        return torch.inference_mode()(lambda: model.forward(own, positions[tokens], DenseStep([(sequence, len(own))])))

    return model.logits(torch.cat(turns.take(half(slice(cut)), half(slice(cut, None)))))


@pytest.mark.parametrize(
    ("copies", "backend"), each_once([("qwen3_moe", 2), ("deepseek_v3", 3), ("llama4_text", 2)], BACKENDS)
)
def test_a_step_in_halves_computes_what_one_rank_would(
    copies: tuple[str, int], backend: All2All, make_checkpoint: Make
) -> None:
    """Between steps that are whole, some of which have no tokens on a rank."""
    family, size = copies
    folder, store = make_checkpoint(family), HashStore()
    lengths = [[40, 7, 2, 33], [3, 0, 21, 6], [2, 9, 2, 17]]
    prompts = [[torch.arange(3, 3 + length) for length in own] for own in lengths]
    alone = load(folder, Placement(torch.float32, CPU, use_kernels=False))

    def rank(ranks: RankGroup) -> list[Tensor]:
        second, _ = gloo_group(store, ranks.index, ranks.size, timedelta(seconds=60))
        halves = Halves(Turns(), second)
        model, own, found = load(folder, replace(placed(backend, data=ranks), halves=halves)), prompts[ranks.index], []
        for step in range(4):
            if step == 1:
                found += logits(model, own[step : step + 1])
            else:
                found.append(logits_in_halves(model, halves.turns, own[step]))
        return found

    found: list[list[Tensor]] = on_ranks(size, rank)
    for own, got in zip(prompts, found, strict=False):
        for expected, one in zip(logits(alone, [prompt for prompt in own if len(prompt)]), got, strict=True):
            assert (one - expected).abs().max() < 1e-4


class Counted(Alone):
    """The first of two ranks, whose other one has nothing to send."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x)])

    def all_to_all(self, x: Tensor, rows: Any) -> Tensor:
        self.sent.append(rows)
        return x


@dataclass
class Moving:
    """A model whose experts move all the time, by the steps before."""

    model: Model
    balance: Balance
    balancer: ExpertBalancer

    @classmethod
    def load(cls, folder: Path, place: Placement, ranks: RankGroup, redundant: int) -> Moving:
        balance = Balance(redundant)
        model = load(folder, replace(place, balance=balance))
        return cls(model, balance, ExpertBalancer(balance.layers, ranks, place.data, window=3, interval=1))

    def logits(self, prompts: list[Tensor]) -> list[Tensor]:
        """See `logits`."""
        found = []
        for prompt in prompts:
            self.balancer.before_step()
            found += logits(self.model, [prompt])
        return found

    @property
    def held(self) -> list[tuple[int, ...]]:
        return [layer.map.held for layer in self.balance.layers]


MOVED = [torch.arange(3, 43), torch.full((32,), 7), torch.full((24,), 9), torch.arange(8), torch.full((16,), 7)] * 3
"""Steps that want a few experts more than others."""
FORMS = {
    "plain": None,
    "fp8 block": Recipe("float", "block", "group", (16, 16)),
    "fp8 fixed": Recipe("float", "tensor", "tensor"),
    "int8": Recipe("int", "channel", "token"),
}


@pytest.mark.parametrize(
    ("form", "ranks", "redundant"),
    each_once([*FORMS], [("tensor", 2), (BACKENDS[0], 3), ("tensor", 4), (BACKENDS[1], 3)], [0, 3]),
)
def test_experts_that_move_compute_the_same(
    form: str, ranks: tuple[str, int], redundant: int, make_checkpoint: Make, tmp_path: Path
) -> None:
    way, size = ranks
    folder, recipe = make_checkpoint("qwen2_moe"), FORMS[form]
    if recipe is not None:
        folder = quantize_checkpoint(folder, tmp_path / "quantized", recipe)
    expected = torch.cat(logits(load(folder, Placement(torch.float32, CPU, use_kernels=False)), MOVED))

    def rank(ranks: RankGroup) -> tuple[Tensor, list[tuple[int, ...]], list[tuple[int, ...]]]:
        backend = next((each for each in BACKENDS if each == way), BACKENDS[0])
        place = placed(backend, data=ranks)
        if way == "tensor":
            place = placed(backend, data=Alone(), tensor=ranks)
        moving = Moving.load(folder, place, ranks, redundant)
        before = moving.held
        return torch.cat(moving.logits(MOVED)), before, moving.held

    found = on_ranks(size, rank)
    for got, before, after in found:
        distances = (got - expected).abs().amax(-1)
        assert (distances < 1e-4).float().mean() > (0.99 if form == "plain" else 0.7)
        assert all(one != other for one, other in zip(before, after, strict=True)), "some of each layer moved"
        assert after == found[0][2], "all know it"


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_move_between_all_ranks_of_several_copies(backend: All2All, make_checkpoint: Make) -> None:
    """Of two tensor ranks each."""
    folder = make_checkpoint("qwen2_moe")
    expected = torch.cat(logits(load(folder, Placement(torch.float32, CPU, use_kernels=False)), MOVED))
    stores = {name: HashStore() for name in ("tensor 0", "tensor 1", "data 0", "data 1")}

    def rank(world: RankGroup) -> tuple[float, list[tuple[int, ...]], list[tuple[int, ...]]]:
        copy, number = divmod(world.index, 2)
        tensor, _ = gloo_group(stores[f"tensor {copy}"], number, 2, timedelta(seconds=60))
        data, _ = gloo_group(stores[f"data {number}"], copy, 2, timedelta(seconds=60))
        moving = Moving.load(folder, placed(backend, data=data, tensor=tensor), world, 3)
        before, got = moving.held, torch.cat(moving.logits(MOVED))
        return float((got - expected).abs().max()), before, moving.held

    found = on_ranks(4, rank)
    for distance, before, after in found:
        assert distance < 1e-4
        assert all(one != other for one, other in zip(before, after, strict=True)), "some of each layer moved"
        assert after == found[0][2], "all know it"


@pytest.mark.parametrize(
    ("family", "use_kernels"),
    [
        pytest.param(family, kernels, marks=() if kernels != (family == "qwen3_moe") else pytest.mark.nightly)
        for family in ("gpt_oss", "gpt_oss mxfp4", "llama4_text", "qwen3_moe", "qwen3_moe ordered")
        for kernels in (False, True)
    ],
)
def test_experts_in_pages_that_move_compute_the_same(
    family: str, use_kernels: bool, make_checkpoint: Make, tmp_path: Path
) -> None:
    """Also on the kernels' twins, in place; biases move too."""
    family, _, form = family.partition(" ")
    folder, prompts = make_checkpoint(family), MOVED[:9]
    if form == "mxfp4":
        folder = mxfp4_checkpoint(folder, tmp_path / form)
    elif form:
        folder = packed_checkpoint(make_checkpoint(family, moe_intermediate_size=64), tmp_path / form, ORDERED)

    @torch.inference_mode()
    def run(model: Model, before: Callable[[], None]) -> Tensor:
        found = []
        for prompt in prompts:
            before()
            positions = torch.arange(len(prompt))
            step = paged_step(model.arch, len(prompt))
            found.append(model.logits(model.forward(prompt, positions, step)))
        return torch.cat(found)

    place = Placement(torch.float32, CPU, use_kernels=use_kernels)
    expected = run(load(folder, place), lambda: None)

    def rank(ranks: RankGroup) -> tuple[Tensor, bool]:
        moving = Moving.load(folder, replace(place, tensor=ranks, expert_parallel=True), ranks, 2)
        before = moving.held
        return run(moving.model, moving.balancer.before_step), before != moving.held

    for got, has_moved in on_ranks(2, rank):
        assert (got - expected).abs().max() < 1e-4
        assert has_moved


@pytest.mark.parametrize("way", ["tensor", BACKENDS[0]])
def test_the_first_copy_tells_what_all_ranks_computed(way: str, make_checkpoint: Make) -> None:
    folder, prompts = make_checkpoint("qwen2_moe"), MOVED[:4]

    def rank(ranks: RankGroup) -> tuple[ExpertLoad | None, int]:
        place = placed(BACKENDS[0], data=ranks)
        if way == "tensor":
            place = placed(BACKENDS[0], data=Alone(), tensor=ranks)
        moving = Moving.load(folder, place, ranks, 1)
        moving.logits(prompts)
        assert moving.model.arch.experts is not None
        return moving.balancer.load, moving.model.arch.experts.routing.top_k * len(moving.balance.layers)

    (first, each), (second, _) = on_ranks(2, rank)
    assert first is not None
    num_copies = 1 if way == "tensor" else 2
    counted = sum(map(len, prompts[:-1]))  # those of the last step are counted before the next
    assert sum(first.rank_tokens) == num_copies * each * counted
    assert 1 <= first.busiest <= 2
    assert second == (first if way == "tensor" else None)


@pytest.mark.parametrize("form", [*FORMS, "mxfp4"])
def test_what_moves_is_reckoned_with_what_is_made_of_it(form: str, make_checkpoint: Make, tmp_path: Path) -> None:
    """And holds no more memory than its own."""
    folder = make_checkpoint("gpt_oss" if form == "mxfp4" else "qwen2_moe")
    if form == "mxfp4":
        folder = mxfp4_checkpoint(folder, tmp_path / "mxfp4")
    elif (recipe := FORMS[form]) is not None:
        folder = quantize_checkpoint(folder, tmp_path / "quantized", recipe)
    balance = Balance(2)
    load(folder, replace(placed(BACKENDS[0], data=Alone(), tensor=Counted()), balance=balance))
    for layer in balance.layers:
        first, second = layer.experts.stored(0), layer.experts.stored(1)
        coded = [part for part in first if part.itemsize == 1]
        if form == "plain":
            assert layer.bytes_each == sum(part.nbytes for part in first)
        else:  # numbers of four bytes besides
            per_byte = 2 if form == "mxfp4" else 1
            numbers = sum(per_byte * part.numel() for part in coded[::per_byte])
            assert layer.bytes_each >= sum(part.nbytes for part in coded) + 4 * numbers
        own = {part.untyped_storage().data_ptr() for part in first if part.dim() == 2}
        assert own.isdisjoint(part.untyped_storage().data_ptr() for part in second if part.dim() == 2)
        assert layer.spare_bytes(0) == layer.bytes_each
        assert layer.move_bytes(0) > 0


def test_load_that_a_model_had_is_balanced(make_checkpoint: Make) -> None:
    """A recorded trace: what every layer's experts were wanted by texts of few tokens."""
    balance = Balance(2)
    place = replace(placed(BACKENDS[0], data=Alone(), tensor=Counted()), balance=balance)
    model = load(make_checkpoint("qwen3_moe"), place)
    logits(model, MOVED)
    for layer in balance.layers:
        load_E = layer.map.wanted_E.tolist()
        assert sum(load_E) == 3 * sum(map(len, MOVED))
        found = place_experts(load_E, layer.map.slots, layer.map.held)
        assert busiest_over_mean(load_E, layer.map.slots, found) < 1.1


def test_rows_that_nobody_wants_elsewhere_do_not_travel() -> None:
    """Every row's experts are at home."""
    other = Counted()
    share = own_experts(4, placed("all2allv", data=other))
    experts = torch.tensor([[0, 1], [1, 0], [NOWHERE, NOWHERE]], dtype=torch.int32)
    delivery = share.exchange.prepare(torch.ones(3, HIDDEN), Routes(torch.ones(3, 2), experts))
    assert share.experts.ranges == (range(2),)
    assert other.sent == [[[2, 0], [0, 0]]] * 2
    assert delivery.finalize(delivery.x_RD)[:, 0].tolist() == [1, 1, 0]
