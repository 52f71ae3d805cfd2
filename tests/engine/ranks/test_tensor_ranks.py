"""A model over tensor ranks against one rank: the same tokens, and logits as near as float32 adds up."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.layers.quantization_scheme import on_load
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model
from pagefleet_engine.ranks.group import Alone, RankGroup
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.checkpoints import FAMILIES
from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.packed_checkpoints import Packed, packed_checkpoint
from tests.fakes.paged_step import paged_step
from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint
from tests.fakes.ranks import on_ranks
from tests.grids import each_once

Make = Callable[..., Path]
CPU = torch.device("cpu")
STEPS, PROMPTS = 12, (1, 7, 40)
# Three ranks need heads in threes; 320 tokens and an MLP of 160 do not divide by three.
THREES = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2 biases": ("olmo2", {"attention_bias": True}),
    "head for each": ("qwen3", {"num_key_value_heads": 4}),
    "experts in some layers": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "odd widths": ("llama", {"vocab_size": 331, "intermediate_size": 150}),
}
MIXTURES = (
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "granitemoe",
    "phimoe",
    "gpt_oss",
    "llama4_text",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "minimax_m2",
    "ernie4_5_moe",
    "dots1",
    "hunyuan_v1_moe",
)
RECIPES = {
    "fp8 tensor": Recipe("float", "tensor", "tensor"),
    "fp8 channel": Recipe("float", "channel", "token"),
    "fp8 block": Recipe("float", "block", "group", (16, 16)),
    "fp8 tensor, dynamic": Recipe("float", "tensor", "token", plain_fp8=True),
    "int8 channel": Recipe("int", "channel", "token"),
    "int8 fixed": Recipe("int", "channel", "tensor"),
    "weights alone": Recipe("float", "block", "none", (16, 16)),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, ranks: RankGroup, arch: ModelArch | None = None, *, kernels: bool = False, **ways: Any) -> Model:
    """`ways`: of the placement, where there are several ranks."""
    place = Placement(torch.float32, CPU, use_kernels=kernels, tensor=ranks)
    if ranks.size > 1:
        place = replace(place, **ways)
    return load_model(folder, arch or read_arch(folder), place, "auto", 0)


@torch.inference_mode()
def generate(model: Model) -> tuple[Tensor, Tensor]:
    """Logits [steps, prompts, vocabulary] and greedy tokens [prompts, steps]; the first step is ragged."""
    sequences, pending = [DenseSequence() for _ in PROMPTS], [torch.arange(3, 3 + length) for length in PROMPTS]
    texts, logits = list(pending), []
    for _ in range(STEPS):
        positions = torch.cat([torch.arange(len(t) - len(p), len(t)) for t, p in zip(texts, pending, strict=True)])
        step = DenseStep([(s, len(p)) for s, p in zip(sequences, pending, strict=True)])
        hidden = model.forward(torch.cat(pending), positions, step)
        logits.append(model.logits(hidden[torch.tensor([len(p) for p in pending]).cumsum(0) - 1]))
        pending = list(logits[-1].argmax(-1, keepdim=True))
        texts = [torch.cat(pair) for pair in zip(texts, pending, strict=True)]
    return torch.stack(logits), torch.stack([text[-STEPS:] for text in texts])


def compare(folder: Path, size: int, arch: ModelArch | None = None, **ways: Any) -> Tensor:
    """How far each row's logits are from those of one rank; tokens are the same, and all of every rank's numbers."""
    expected, tokens = generate(load(folder, Alone(), arch))
    (first, *others) = on_ranks(size, lambda ranks: generate(load(folder, ranks, arch, **ways)))
    assert torch.equal(first[1], tokens)
    for logits, _ in others:
        assert torch.equal(logits, first[0])
    return (first[0] - expected).abs().amax(-1)


def mostly_near(distances: Tensor) -> bool:
    """Sums in another order turn the rounding of an input, once in ten thousand: what follows in that text is off."""
    return bool((distances < 1e-4).float().mean() > 0.7)


@pytest.mark.parametrize(("case", "size"), each_once([*CASES], [2, 3, 4]))
def test_every_family_over_ranks(case: str, size: int, make_checkpoint: Make) -> None:
    family, config = CASES[case]
    if size == 3:
        config = config | THREES
    assert compare(make_checkpoint(family, **config), size).max() < 1e-4


@pytest.mark.parametrize(("case", "size"), each_once([*CASES], [3, 2]))
def test_every_family_with_tokens_of_its_own_on_each_rank(case: str, size: int, make_checkpoint: Make) -> None:
    """Steps of 48 tokens and of 3: they divide, and do not."""
    family, config = CASES[case]
    if size == 3:
        config = config | THREES
    assert compare(make_checkpoint(family, **config), size, sequence_parallel=True).max() < 1e-4


def test_more_ranks_than_tokens(make_checkpoint: Make) -> None:
    """Steps of three tokens on four ranks: the last has none."""
    assert compare(make_checkpoint("llama"), 4, sequence_parallel=True).max() < 1e-4


@pytest.mark.parametrize("form", RECIPES)
def test_quantized_forms_with_tokens_of_its_own_on_each_rank(form: str, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", RECIPES[form])
    assert mostly_near(compare(folder, 2, sequence_parallel=True))


@pytest.mark.parametrize(("form", "family"), each_once([*RECIPES], ["llama", "phi3", "bloom", "gemma3n_text"]))
def test_every_quantized_form_over_ranks(form: str, family: str, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = quantize_checkpoint(make_checkpoint(family), tmp_path / "quantized", RECIPES[form])
    assert mostly_near(compare(folder, 4))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_quantized_on_load_over_ranks(family: str, make_checkpoint: Make) -> None:
    folder = make_checkpoint(family)
    arch = replace(read_arch(folder), quantization=on_load("fp8"))
    assert mostly_near(compare(folder, 4, arch))


@pytest.mark.parametrize(
    ("over", "form"),
    each_once(
        [
            *itertools.product(["llama", "gemma3_text", "gemma3n_text", "olmo2"], ["", "sequence_parallel"]),
            *itertools.product(["qwen2_moe", "glm4_moe"], ["", "expert_parallel"]),
        ],
        [Recipe("float", "block", "group", (16, 16)), Recipe("float", "tensor", "tensor"), None],
    ),
)
def test_the_path_of_a_gpu_over_ranks(
    over: tuple[str, str], form: Recipe | None, make_checkpoint: Make, tmp_path: Path
) -> None:
    """On the kernels' twins: sums that products leave to the next norm, inputs that come rounded."""
    family, way = over
    folder = make_checkpoint(family, attention_bias=True)
    ways: dict[str, Any] = {way: True} if way else {}
    if form is not None:
        folder = quantize_checkpoint(folder, tmp_path / "quantized", form)

    @torch.inference_mode()
    def prefill(ranks: RankGroup) -> Tensor:
        model, positions = load(folder, ranks, kernels=True, **ways), torch.arange(40)
        tokens = positions + (80 if family == "gemma3n_text" else 0)  # no rounding turns before their last
        return model.logits(model.forward(tokens, positions, paged_step(model.arch, len(tokens))))

    assert mostly_near((on_ranks(2, prefill)[1] - prefill(Alone())).abs().amax(-1))


@pytest.mark.parametrize(("family", "size"), each_once(MIXTURES, [2, 3, 4]))
def test_whole_experts_on_ranks(family: str, size: int, make_checkpoint: Make) -> None:
    """Eight experts, or four, on three ranks too."""
    folder = make_checkpoint(family, **(THREES if size == 3 else {}))
    assert compare(folder, size, expert_parallel=True).max() < 1e-4


def test_whole_experts_with_tokens_of_its_own_on_each_rank(make_checkpoint: Make) -> None:
    folder = make_checkpoint("deepseek_v3")
    assert compare(folder, 4, expert_parallel=True, sequence_parallel=True).max() < 1e-4


@pytest.mark.parametrize(("form", "family"), each_once([*RECIPES], ["glm4_moe", "qwen2_moe"]))
def test_quantized_forms_of_whole_experts(form: str, family: str, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = quantize_checkpoint(make_checkpoint(family), tmp_path / "quantized", RECIPES[form])
    assert mostly_near(compare(folder, 2, expert_parallel=True))


def test_a_rank_reads_its_own_experts_alone(make_checkpoint: Make) -> None:
    """Of stacked tensors their part."""
    block, each = "block_sparse_moe", "model.layers.1.mlp.experts"

    def has(ranks: RankGroup) -> tuple[list[int], int]:
        weights = dict(load(make_checkpoint("qwen3_moe"), ranks, expert_parallel=True).weights())
        stacked = dict(load(make_checkpoint("granitemoe"), ranks, expert_parallel=True).weights())
        own = [number for number in range(8) if f"{each}.{number}.down_proj.weight" in weights]
        return own, stacked[f"model.layers.1.{block}.output_linear.weight"].shape[0]

    assert on_ranks(2, has) == [([0, 1, 2, 3], 4 * 64), ([4, 5, 6, 7], 4 * 64)]


def test_blocks_are_not_cut(make_checkpoint: Make, tmp_path: Path) -> None:
    recipe = Recipe("float", "block", "none", (32, 32))
    folder = quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", recipe)

    def refused(ranks: RankGroup) -> str:
        with pytest.raises(ModelLoadError) as error:
            load(folder, ranks)
        return str(error.value)

    assert on_ranks(2, refused)[0] == (
        "model.layers.0.self_attn.qkv_proj: 2 ranks would cut blocks of 32x32 that share a scale: give a smaller "
        "--tensor-parallel-size"
    )


def test_heads_in_groups_do_not_cut_blocks(make_checkpoint: Make, tmp_path: Path) -> None:
    recipe = Recipe("float", "block", "none", (32, 32))
    folder = quantize_checkpoint(make_checkpoint("bloom"), tmp_path / "quantized", recipe)
    with pytest.raises(ModelLoadError, match=r"query_key_value: queries, keys and values .* one scale per channel"):
        load(folder, Alone())


PACKED = {
    "awq": Packed("awq", zeros=True, group=16),
    "gptq in act order": Packed("gptq", zeros=True, ordered=True),
    "gptq of 2 bits": Packed("gptq_v2", 2, zeros=True),
    "pack-quantized": Packed("pack-quantized", zeros=True),
    "pack-quantized by row": Packed("pack-quantized", 8, group=None),
}


@pytest.mark.parametrize(("form", "family"), each_once([*PACKED], ["llama", "phi3", "qwen3_moe"]))
def test_numbers_of_a_few_bits_over_ranks(form: str, family: str, make_checkpoint: Make, tmp_path: Path) -> None:
    config = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    folder = packed_checkpoint(make_checkpoint(family, **config), tmp_path / "packed", PACKED[form])
    assert compare(folder, 2).max() < 1e-4


@pytest.mark.parametrize("form", ["awq", "gptq in act order"])
def test_whole_experts_of_a_few_bits(form: str, make_checkpoint: Make, tmp_path: Path) -> None:
    made = make_checkpoint("qwen3_moe", moe_intermediate_size=64)
    folder = packed_checkpoint(made, tmp_path / "packed", PACKED[form])
    assert compare(folder, 2, expert_parallel=True).max() < 1e-4


def test_groups_are_not_cut(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = packed_checkpoint(make_checkpoint("llama"), tmp_path / "packed", Packed("awq", zeros=True))

    def refused(ranks: RankGroup) -> str:
        with pytest.raises(ModelLoadError) as error:
            load(folder, ranks)
        return str(error.value)

    assert on_ranks(4, refused)[0] == (
        "model.layers.0.self_attn.o_proj: 4 ranks would cut pieces of 8x32 numbers that share words or a scale: give a "
        "smaller --tensor-parallel-size"
    )


def test_matrices_stored_transposed_in_eight_bits(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = quantize_checkpoint(make_checkpoint("gpt2"), tmp_path / "quantized", Recipe("float", "tensor", "token"))
    with pytest.raises(ModelLoadError, match=r"c_attn is quantized with a row for each input: give it in a float"):
        load(folder, Alone())


def test_heads_that_do_not_divide(make_checkpoint: Make) -> None:
    with pytest.raises(ConfigError, match="4 heads of attention over 2 of keys and values cannot be divided among 3"):
        read_arch(make_checkpoint("llama")).of_rank(0, 3)


def test_a_rank_keeps_its_heads_alone(make_checkpoint: Make) -> None:
    whole = read_arch(make_checkpoint("llama"))
    part = whole.of_rank(1, 4)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (1, 1, 40)
    assert (part.vocab_size, part.hidden_size) == (whole.vocab_size, whole.hidden_size)


def test_numbers_that_are_none_on_one_rank_are_none_on_all(make_checkpoint: Make, tmp_path: Path) -> None:
    """A weight of the last rank's alone: its heads, its part of the MLP, its tokens' logits."""
    source = make_checkpoint("llama")
    last = {"self_attn.v_proj": (-1, 0), "mlp.down_proj": (0, -1), "lm_head": (-1, 0)}
    for layer, place in last.items():
        folder = tmp_path / layer
        folder.mkdir()
        tensors = load_file(source / "model.safetensors")
        (name,) = [name for name in tensors if f"{layer}.weight" in name and ("layers" not in name or ".1." in name)]
        tensors[name] = tensors[name].clone()
        tensors[name][place] = float("nan")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text((source / "config.json").read_text())
        bad = on_ranks(2, lambda ranks, folder=folder: generate(load(folder, ranks))[0].isnan())  # type: ignore[misc]
        assert bad[0].any(-1).all()
        assert torch.equal(bad[0], bad[1])


def test_dummy_weights_are_parts_of_the_same_numbers(make_checkpoint: Make) -> None:
    folder = make_checkpoint("phi3")

    def made(ranks: RankGroup) -> Tensor:
        place = Placement(torch.float32, CPU, use_kernels=False, tensor=ranks)
        return generate(load_model(folder, read_arch(folder), place, "dummy", 5))[0]

    assert all((logits - made(Alone())).abs().max() < 1e-4 for logits in on_ranks(4, made))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_rank_reads_its_part_of_the_file(family: str, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all four read together is the file once, and what no rank shares: norms, and keys that two of them have."""
    folder, lock, plain, ranks_read = make_checkpoint(family), threading.Lock(), os.preadv, [0]

    def counting(file: int, views: Any, offset: int) -> int:
        count = plain(file, views, offset)
        with lock:
            ranks_read[0] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    on_ranks(4, lambda ranks: load(folder, ranks))
    tensors = load_file(folder / "model.safetensors")
    arch = read_arch(folder)
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    keys_and_values = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * arch.hidden_size * 4
    assert ranks_read[0] == sum(tensor.nbytes for tensor in tensors.values()) + 3 * norms + keys_and_values
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2
