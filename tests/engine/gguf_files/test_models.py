"""A model in GGUF computes what its checkpoint in safetensors does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.quants import quantize
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.blocks import BLOCK_TYPES, BY_NAME
from pagefleet_engine.gguf.file import read_gguf
from pagefleet_engine.gguf.folder import folder_of
from pagefleet_engine.layers.quantization.block_slots import BlockSlots, BlocksMatrix, packed_weights
from pagefleet_engine.layers.quantization_scheme import BlockScheme
from pagefleet_engine.layers.shard import shard_of
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.gguf import gguf_sources
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from pagefleet_kernels.native.library import Library
from torch import Tensor

from tests.fakes.checkpoints import LONGROPE
from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.gguf_blocks import random_blocks
from tests.fakes.gguf_files import Type, write_gguf
from tests.fakes.gguf_tensors import ARCHITECTURES
from tests.fakes.native_kernels import experts_one_by_one, native_library
from tests.fakes.paged_step import paged_step

Make = Callable[..., Path]
_LENGTH = 12


def logits(folder: Path, *, use_kernels: bool = False, native: Library | None = None) -> Tensor:
    place = Placement(torch.float32, torch.device("cpu"), use_kernels, native=native)
    model = load_model(folder, read_arch(folder), place, "auto", 0)
    with torch.inference_mode():
        step = paged_step(model.arch, _LENGTH) if use_kernels else DenseStep([(DenseSequence(), _LENGTH)])
        return model.logits(model.forward(torch.arange(3, 3 + _LENGTH), torch.arange(_LENGTH), step))


_GEMMA3 = {
    "num_hidden_layers": 7,
    "layer_types": [f"{'full' if layer == 5 else 'sliding'}_attention" for layer in range(7)],
    "query_pre_attn_scalar": 32,
}
_COHERE2 = {
    "num_hidden_layers": 5,
    "layer_types": [f"{'full' if layer == 3 else 'sliding'}_attention" for layer in range(5)],
    "sliding_window": 6,
}
_LLAMA4 = {"no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192, "floor_scale": 8192}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": _GEMMA3,
    "cohere": {"use_qk_norm": True},
    "cohere2": _COHERE2,
    "glm4_moe": {"n_group": 1, "topk_group": 1, "attention_bias": True},
    "llama4_text": _LLAMA4,
    "stablelm": {"use_qkv_bias": True},
    "phimoe": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 512,
        "rope_parameters": LONGROPE | {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122},
    },
    "dots1": {"sliding_window": None, "attention_bias": True},
    "ernie4_5": {"use_bias": True},
    "hunyuan_v1_dense": {"rope_parameters": None, "attention_bias": True},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "attention_bias": True},
    "glm4_moe_lite": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"rope_parameters": _YARN},
    "deepseek_v3": {"rope_parameters": _YARN | {"beta_fast": 8.0}},
}
_WIDTHS: dict[str, dict[str, int]] = {
    "gemma3n_text": {"laurel_rank": 32, "hidden_size_per_layer_input": 32},
    "llama4_text": {"intermediate_size": 64, "intermediate_size_mlp": 96},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "glm4_moe": {"moe_intermediate_size": 64},
    "granitemoe": {"intermediate_size": 64},
    "minimax_m2": {"intermediate_size": 64},
    "hunyuan_v1_moe": {"intermediate_size": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 64},
    "dots1": {"moe_intermediate_size": 64},
    "deepseek_v3": {
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
    },
}
"""Of whole blocks."""
_SHAPES: dict[str, dict[str, Any]] = {
    "mpt": {"attention.max_alibi_bias": 8.0},
    "phimoe": {"rope.scaling.original_context_length": 512},
    "gemma3_text": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "glm4_moe": {"rope.dimension_count": 16},
    "olmo3": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    },
    "glm4_moe_lite": {"expert_gating_func": None, "leading_dense_block_count": 1},
    "gpt_oss": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    },
    "phi3": {
        "rope.dimension_count": 16,
        "rope.scaling.original_context_length": 512,
        "rope.scaling.attn_factor": (1 + math.log(8) / math.log(512)) ** 0.5,
    },
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_are_those_of_the_checkpoint(kind: str, make_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(kind, **_CONFIGS.get(kind, {}))
    write_gguf(checkpoint, tmp_path / "model.gguf", shape=_SHAPES.get(kind))
    found = logits(folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True))
    torch.testing.assert_close(found, logits(checkpoint), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "llama4_text"])
def test_frequencies_are_divided_as_the_file_says(kind: str, make_checkpoint: Make, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    checkpoint = make_checkpoint(kind, **_CONFIGS.get(kind, {}), rope_parameters=rope)
    write_gguf(checkpoint, tmp_path / "model.gguf")
    found = logits(folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True))
    torch.testing.assert_close(found, logits(checkpoint), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "shape"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, {}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, {}),
        ("mpt", {"attn_config": {"clip_qkv": 0.5}}, {"attention.clamp_kqv": 0.5}),
        ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}, {}),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["full_attention"] * 3},
            {"attention.sliding_window_pattern": None},
        ),
    ],
)
def test_models_of_a_kind_that_differ(
    kind: str, changes: dict[str, Any], shape: dict[str, Any], make_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(kind, **changes)
    write_gguf(checkpoint, tmp_path / "model.gguf", shape=_SHAPES.get(kind, {}) | shape)
    found = logits(folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True))
    torch.testing.assert_close(found, logits(checkpoint), rtol=1e-4, atol=1e-4)


_HEADS_AS_THEY_ARE = {
    "attention.key_length": 40,
    "attention.value_length": 20,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
    "expert_gating_func": None,
}


@pytest.mark.parametrize(("kind", "shape"), [("deepseek_v2", _HEADS_AS_THEY_ARE), ("phi", {})])
def test_a_file_as_older_converters_wrote_it(
    kind: str, shape: dict[str, Any], make_checkpoint: Make, tmp_path: Path
) -> None:
    """DeepSeek's from before llama.cpp computed with latents; and Phi's with projections in one."""
    checkpoint = make_checkpoint(kind, **_CONFIGS.get(kind, {}))
    write_gguf(checkpoint, tmp_path / "model.gguf", shape=shape, older=True)
    found = logits(folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True))
    torch.testing.assert_close(found, logits(checkpoint), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("deepseek_v3", {"expert_gating_func": 4}, "expert_gating_func is 4, and 1"),
        ("minimax_m2", {"expert_gating_func": 1}, "expert_gating_func is not 2 (sigmoid)"),
        ("dots1", {"expert_gating_func": 1}, "expert_gating_func is not 2 (sigmoid)"),
        ("ernie4_5_moe", {"expert_gating_func": 2}, "expert_gating_func is not 1 (softmax)"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "attention.sliding_window_pattern is no list of 3"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "asks for queries that grow"),
        ("deepseek_v3", {"expert_count": None}, "expert_count is 0, and"),
        ("bloom", {"feed_forward_length": 128}, "feed_forward_length is not four times the width"),
        ("bloom", {"attention.head_count_kv": 1}, "attention.head_count_kv is not that of all heads"),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "attention.max_alibi_bias is 0, and only models with ALiBi"),
        ("mpt", {"feed_forward_length": 100}, "feed_forward_length is no multiple of the width"),
        ("gemma3n_text", {"altup.num_inputs": 4}, "altup.num_inputs is 4, and 'altup_"),
        ("gemma3n_text", {"activation_sparsity_scale": [0.0]}, "activation_sparsity_scale is no list of 5"),
        ("gemma3n_text", {"attention.shared_kv_layers": None}, "attention.shared_kv_layers is missing"),
        ("llama", {"context_length": [64, 128]}, "llama.context_length is [64, 128]: convert"),
        ("llama", {"block_count": 5000}, "model.gguf: num_hidden_layers is 5000; it must be an integer from 1 to 4096"),
        ("llama", {"rope.scaling.type": "a\nb"}, r"rope.scaling.type is a\nb, and none"),
    ],
)
def test_what_a_kind_does_not_run_is_one_line(
    kind: str, shape: dict[str, Any], words: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(kind, **_CONFIGS.get(kind, {}))
    write_gguf(checkpoint, tmp_path / "model.gguf", shape=_SHAPES.get(kind, {}) | shape)
    with pytest.raises(ModelLoadError) as error:
        folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


_IN_BLOCKS = ["phi3", "granite", "cohere", "qwen2_moe", "glm4_moe", "granitemoe", "gpt_oss"]
_IN_BLOCKS += ["deepseek_v3", "llama4_text", "gemma3n_text", "phi", "gpt2", "falcon", "bloom", "mpt", "stablelm"]
_IN_BLOCKS += [
    "smollm3",
    "seed_oss",
    "minimax_m2",
    "glm4",
    "olmo3",
    "exaone4",
    "ernie4_5_moe",
    "dots1",
    "hunyuan_v1_moe",
]


@pytest.mark.parametrize("kind", _IN_BLOCKS)
def test_layers_in_blocks_are_found_by_their_names(kind: str, make_checkpoint: Make, tmp_path: Path) -> None:
    """Else they would be expanded as they are read, and compiled kernels would change nothing."""
    widths = _WIDTHS.get(kind, {})
    checkpoint = make_checkpoint(kind, **_CONFIGS.get(kind, {}) | widths)
    write_gguf(checkpoint, tmp_path / "model.gguf", matrices=Type.Q8_0, shape=_SHAPES.get(kind))
    folder = folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True)
    schemes = read_arch(folder).quantization
    assert schemes is not None
    of_types = {rule.scheme for rule in schemes.rules}
    assert of_types == {BlockScheme(("Q8_0",))}
    (source,) = gguf_sources(folder)
    in_blocks = [name.removesuffix(".weight") for name in source.names if source.dtype(name) == "Q8_0"]
    assert {schemes.scheme([name]) for name in in_blocks if not re.search("embed|wte|wpe", name)} == of_types
    # Random weights this wide, and choices of experts, make much of the rounding of inputs.
    found, expected = logits(folder, native=native_library()), logits(folder)
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.2 * expected.norm()


def test_a_head_that_is_the_embedding_stays_in_blocks(make_checkpoint: Make, tmp_path: Path) -> None:
    """Of compiled kernels alone: each step reads all of it."""
    checkpoint = make_checkpoint("qwen2", tie_word_embeddings=True)
    write_gguf(checkpoint, tmp_path / "model.gguf", types={"token_embd": Type.Q8_0})
    folder = folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True)
    found, expected = logits(folder, native=native_library()), logits(folder)
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.02 * expected.norm()
    place = Placement(torch.float32, torch.device("cpu"), False)
    for native, has_own in ((native_library(), True), (None, False)):
        model = load_model(folder, read_arch(folder), replace(place, native=native), "auto", 0)
        assert ("lm_head.weight" in dict(model.weights())) is has_own


@pytest.mark.parametrize("name", [kind.name for kind in BLOCK_TYPES.values() if kind.plain is None])
def test_compiled_kernels_multiply_what_blocks_stand_for(name: str) -> None:
    """Of two projections of different types, by inputs that are rounded to 8 bits."""
    kinds, inputs, outputs = (BY_NAME[name], BY_NAME["Q6_K"]), 512, 96
    place = replace(Placement(torch.float32, torch.device("cpu"), False), native=native_library(), path="layer.up_proj")
    types = (getattr(Type, kind.name) for kind in kinds)
    stored = [torch.from_numpy(random_blocks(kind, outputs, inputs, seed=1)) for kind in types]
    installed: list[BlocksMatrix] = []
    slots = BlockSlots(BlockScheme((name, "Q6_K")), shard_of(inputs), (shard_of(outputs),) * 2, place, installed.append)
    for part, blocks in enumerate(stored):
        slots.slots["weight"].fill(part, blocks)
    values_OI = torch.cat(
        [kind.decode(one.view(-1, kind.num_bytes)).view(outputs, -1) for kind, one in zip(kinds, stored, strict=True)]
    )
    (matrix,) = installed
    torch.testing.assert_close(matrix.plain(), values_OI)
    x_TI = torch.randn(5, inputs, generator=torch.Generator().manual_seed(2))
    found, expected = matrix.kernel(0, 2 * outputs).linear(x_TI, None), x_TI @ values_OI.t()
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    torch.testing.assert_close(matrix.kernel(100, 150).linear(x_TI, None), found[:, 100:150])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "llama4_text", "deepseek_v3"])
def test_experts_stay_in_their_blocks(kind: str, make_checkpoint: Make, tmp_path: Path) -> None:
    """Gate and up in 4 bits, down in 8: on a GPU, and by compiled kernels."""
    width = _WIDTHS.get(kind) or {"intermediate_size" if kind == "mixtral" else "moe_intermediate_size": 64}
    types = {"ffn_gate_exps": Type.Q4_0, "ffn_up_exps": Type.Q4_0}
    write_gguf(
        make_checkpoint(kind, **_CONFIGS.get(kind, {}) | width),
        tmp_path / "model.gguf",
        matrices=Type.Q8_0,
        types=types,
    )
    folder = folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True)
    schemes = read_arch(folder).quantization
    assert schemes is not None
    name = next(name for name in gguf_sources(folder)[0].names if "experts.2." in name).removesuffix(".weight")
    assert isinstance(schemes.scheme([name]), BlockScheme)
    torch.testing.assert_close(logits(folder, use_kernels=True), logits(folder), rtol=1e-3, atol=1e-3)
    found = logits(folder, native=native_library())
    with experts_one_by_one():
        expected = logits(folder, native=native_library())
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_experts_in_codes_of_4_bits(make_checkpoint: Make, tmp_path: Path) -> None:
    """A layer of them is what their products one by one are, and these are what the codes stand for."""
    checkpoint = make_checkpoint("qwen3_moe", moe_intermediate_size=64)
    write_gguf(checkpoint, tmp_path / "model.gguf", matrices=Type.Q8_0, types={"_exps": Type.MXFP4})
    folder = folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True)
    found = logits(folder, native=native_library())
    with experts_one_by_one():
        expected = logits(folder, native=native_library())
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.01 * expected.norm()
    assert (expected - logits(folder)).norm() < 0.1 * expected.norm()


_OF_GRIDS = {
    "blk.1.ffn": Type.TQ2_0,
    "attn_q": Type.IQ1_S,
    "attn_k": Type.IQ1_M,
    "attn_v": Type.IQ2_XXS,
    "attn_output": Type.IQ2_XS,
    "ffn_gate": Type.IQ2_S,
    "ffn_up": Type.IQ3_XXS,
    "ffn_down": Type.IQ3_S,
    "token_embd": Type.TQ1_0,
}


def test_types_of_few_bits_are_what_the_reference_makes_of_them(tmp_path: Path) -> None:
    """Expanded, in codes by GPU kernels' twins, and by compiled kernels; the head too, which is the embedding."""
    tiny = builtin_model_path("tiny")
    folders = []
    for name, expanded in (("few", False), ("plain", True)):
        write_gguf(tiny, tmp_path / f"{name}.gguf", types=_OF_GRIDS, expanded=expanded)
        folders.append(folder_of(tmp_path / f"{name}.gguf", tmp_path / "cache", with_tokenizer=False))
    expected = logits(folders[1])
    torch.testing.assert_close(logits(folders[0]), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(folders[0], use_kernels=True), expected, rtol=1e-3, atol=1e-3)
    found = logits(folders[0], native=native_library())
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()


def experts_of_few_bits(make_checkpoint: Make, path: Path, **types: Type) -> Path:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    write_gguf(make_checkpoint("qwen3_moe", **sizes), path, matrices=Type.Q8_0, types=types)
    return folder_of(path, path.parent / "cache", with_tokenizer=True)


def test_experts_of_few_bits(make_checkpoint: Make, tmp_path: Path) -> None:
    types = {"gate_exps": Type.IQ2_XS, "up_exps": Type.IQ2_XS, "down_exps": Type.IQ3_XXS}
    folder = experts_of_few_bits(make_checkpoint, tmp_path / "model.gguf", **types)
    expected = logits(folder)
    torch.testing.assert_close(logits(folder, use_kernels=True), expected, rtol=1e-3, atol=1e-3)
    assert (logits(folder, native=native_library()) - expected).norm() < 0.1 * expected.norm()


def test_gate_and_up_of_different_types_are_refused_on_a_gpu(make_checkpoint: Make, tmp_path: Path) -> None:
    types = {"gate_exps": Type.IQ2_XS, "up_exps": Type.IQ3_XXS}
    folder = experts_of_few_bits(make_checkpoint, tmp_path / "model.gguf", **types)
    with pytest.raises(ModelLoadError, match="gate and up are in blocks of different types"):
        logits(folder, use_kernels=True)


def test_experts_with_biases_are_refused_where_no_kernel_adds_them(make_checkpoint: Make, tmp_path: Path) -> None:
    write_gguf(make_checkpoint("gpt_oss"), tmp_path / "model.gguf", matrices=Type.Q8_0, shape=_SHAPES["gpt_oss"])
    with pytest.raises(ModelLoadError, match="experts with biases in 8 bits are not run on a GPU"):
        logits(folder_of(tmp_path / "model.gguf", tmp_path / "cache", with_tokenizer=True), use_kernels=True)


def test_packed_matrices_stand_for_the_same_numbers() -> None:
    random = np.random.default_rng(5)
    for name in ("Q4_0", "Q5_0", "Q8_0"):
        kind = BY_NAME[name]
        numbers = random.standard_normal((6, 96), np.float32)
        stored = torch.from_numpy(quantize(numbers, getattr(Type, name)))
        expected = kind.decode(stored.view(-1, kind.num_bytes)).view(6, 96)
        assert torch.equal(packed_weights(stored, kind).dequantize(), expected)


def test_a_scale_that_is_no_number_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint("llama"), path, matrices=Type.Q8_0)
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.start : tensor.start + 2] = b"\xff\xff"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight holds a scale that is no finite number"):
        logits(folder_of(path, tmp_path / "cache", with_tokenizer=True), use_kernels=True)
