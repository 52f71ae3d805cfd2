"""What a configuration says of a model, for every kind and every spelling, and what is refused with which words."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.models.config_file import arch_from_config
from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.kv_spec import KVSpec
from pagefleet_protocol.model_config.quantized import quantized_as
from pagefleet_protocol.model_config.shape import MODEL_TYPES, ModelShape, read_shape

from tests.example_counts import examples

BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 64,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def read(config: dict[str, Any]) -> ModelShape:
    return read_shape(config, "config.json")


def ropes() -> st.SearchStrategy[dict[str, Any]]:
    """Spellings of a stretched context; LongRoPE's factors fit heads of 16."""
    factors = st.sampled_from([2, 4.0, 7.5])
    original = st.sampled_from([{}, {"original_max_position_embeddings": 128}])
    longrope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return st.one_of(
        st.just({}),
        st.just({"rope_scaling": None}),
        factors.map(lambda factor: {"rope_scaling": {"type": "linear", "factor": factor}}),
        factors.map(lambda factor: {"rope_parameters": {"rope_type": "dynamic", "factor": factor, "rope_theta": 1e6}}),
        st.builds(
            lambda factor, more: {"rope_scaling": {"rope_type": "yarn", "factor": factor} | more}, factors, original
        ),
        original.map(lambda more: {"rope_scaling": {"rope_type": "yarn"} | more}),
        original.map(lambda more: {"rope_scaling": longrope | more}),
        original.map(lambda more: {"rope_scaling": longrope} | more),
    )


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configurations that can be, with fields left out, null, or there."""
    kind = draw(st.sampled_from(MODEL_TYPES))
    num_layers = draw(st.integers(1, 40))
    config = {**BASE, "model_type": kind, "num_hidden_layers": num_layers}
    config["num_key_value_heads"] = draw(st.sampled_from([1, 2, 4]))
    config["head_dim"] = draw(st.sampled_from([16, 16, 16, None]))
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"):
        config |= {"qk_rope_head_dim": 16, "num_experts_per_tok": 2}
    always_slides = kind.startswith("gemma") or kind in ("cohere2", "gpt_oss", "olmo3")
    config["sliding_window"] = 64 if always_slides else draw(st.sampled_from([None, 32, 64]))
    config |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "use_sliding_window": st.booleans(),
                "max_window_layers": st.integers(0, 50),
                "sliding_window_pattern": st.integers(1, 8),
                "layer_types": st.lists(
                    st.sampled_from(["full_attention", "sliding_attention"]), min_size=num_layers, max_size=num_layers
                ),
                "dtype": st.sampled_from(["bfloat16", "float16"]),
                "torch_dtype": st.sampled_from(["torch.bfloat16", "float32"]),
            },
        )
    )
    if draw(st.booleans()) and not always_slides:
        del config["sliding_window"]
    if kind.startswith("gemma3") or kind == "olmo3":
        config |= draw(st.sampled_from([{}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}]))
    else:
        config |= draw(ropes()) | {"partial_rotary_factor": 1.0}
    if kind.startswith("llama4"):
        # With norms of rotated heads a rotation may not stretch them; local layers have another name.
        config |= {"use_qk_norm": False, "layer_types": None, "attention_chunk_size": 64}
    if kind.startswith("gemma3n"):
        config["num_kv_shared_layers"] = 0
    if kind in ("gemma3", "gemma3n", "llama4"):
        outside = {name: config.pop(name) for name in ("dtype", "torch_dtype") if name in config}
        return {"model_type": kind, "text_config": config | {"model_type": f"{kind}_text"}} | outside
    return config


@pytest.mark.parametrize(
    ("kind", "changes", "sliding"),
    [
        ("llama", {}, ""),
        ("olmo2", {}, ""),
        ("mistral", {}, "012345"),
        ("mistral", {"sliding_window": None}, ""),
        ("phi3", {}, "012345"),
        ("qwen2", {}, ""),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 4}, "45"),
        ("qwen3", {"use_sliding_window": True}, ""),
        ("qwen2", {"use_sliding_window": True, "layer_types": [SLIDING, FULL] * 3}, "024"),
        ("gemma2", {}, "024"),
        ("gemma2", {"layer_types": [FULL] * 5 + [SLIDING]}, "5"),
        ("gemma3_text", {}, "01234"),
        ("gemma3_text", {"sliding_window_pattern": 2}, "024"),
        ("gemma3_text", {"sliding_window_pattern": 1}, ""),
    ],
)
def test_windows(kind: str, changes: dict[str, Any], sliding: str) -> None:
    windows = read({**BASE, "model_type": kind, **changes}).windows
    assert windows == tuple(64 if str(layer) in sliding else None for layer in range(6))


@pytest.mark.parametrize(
    ("changes", "chunked"),
    [
        ({}, "01245"),
        ({"no_rope_layers": []}, "01245"),
        ({"no_rope_layer_interval": 2}, "024"),
        ({"no_rope_layers": [0, 1, 0, 0, 0, 1, 1]}, "15"),
        ({"layer_types": [FULL, "chunked_attention"] * 3}, "135"),
    ],
)
def test_chunks(changes: dict[str, Any], chunked: str) -> None:
    shape = read({**BASE, "model_type": "llama4_text", "attention_chunk_size": 128, **changes})
    assert shape.windows == tuple(128 if str(layer) in chunked else None for layer in range(6))
    assert shape.chunked
    assert not read({**BASE, "model_type": "mistral"}).chunked


@pytest.mark.parametrize("given", [[1, 0], [1, 1, 1, 1, 1, 2]])
def test_a_list_of_layers_that_cannot_be_is_one_line(given: list[int]) -> None:
    with pytest.raises(ModelConfigError, match="no_rope_layers must be a list of 0 and 1, one for each of 6 layers"):
        read({**BASE, "model_type": "llama4_text", "no_rope_layers": given})


@pytest.mark.parametrize(
    ("kind", "changes", "lengths"),
    [
        ("llama", {}, (512, 512)),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 7.5}}, (3840, 3840)),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, (1024, 1024)),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, (2048, 2048)),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 128}},
            (512, 512),
        ),
        (
            "phi3",
            {
                "original_max_position_embeddings": 128,
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            },
            (512, 128),
        ),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (512, 512)),
    ],
)
def test_lengths(kind: str, changes: dict[str, Any], lengths: tuple[int, int]) -> None:
    shape = read({**BASE, "model_type": kind, **changes})
    assert (shape.context_length, shape.default_length) == lengths


@pytest.mark.parametrize(
    ("kind", "changes", "count"),
    [
        ("llama", {"num_local_experts": 8}, 0),
        ("mixtral", {}, 8),
        ("deepseek_v3", {"n_routed_experts": 160}, 160),
        ("qwen3_moe", {"num_experts": 64}, 64),
        ("qwen3_moe", {"num_local_experts": 32}, 32),
        ("gpt_oss", {"num_local_experts": 32}, 32),
    ],
)
def test_experts_are_counted_under_the_name_that_a_family_gives_them(
    kind: str, changes: dict[str, Any], count: int
) -> None:
    shape = read({**BASE, "model_type": kind, "kv_lora_rank": 32, "qk_rope_head_dim": 16, **changes})
    assert shape.num_experts == count


def test_the_text_model_of_images_and_text_inherits() -> None:
    text = {**BASE, "model_type": "gemma3_text"}
    shape = read({"model_type": "gemma3", "torch_dtype": "torch.bfloat16", "text_config": text})
    assert (shape.model_type, shape.num_layers, shape.dtype, shape.head_dim) == ("gemma3", 6, "bfloat16", 256)


@given(configs())
@settings(max_examples=examples(100), deadline=None)
def test_every_configuration_that_can_be_is_read_by_the_engine_too(config: dict[str, Any]) -> None:
    shape, arch = read(config), arch_from_config(config, "config.json")
    assert (arch.context_length, arch.windows, arch.dtype) == (shape.context_length, shape.windows, shape.dtype)
    routing = None if arch.experts is None else arch.experts.routing
    assert routing is None or (routing.num_experts, routing.top_k) == (shape.num_experts, shape.experts_per_token)


@given(
    configs(),
    st.sampled_from(
        [*BASE, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "dtype", "architectures",
         "partial_rotary_factor", "rms_norm_eps", "query_pre_attn_scalar", "text_config", "quantization_config"],
    ),
    st.sampled_from(
        [0, -1, 3, 2**31, 10**400, 1e308, "4", 1.5, True, [], {}, [[]], {"rope_type": "linear", "factor": 1e308},
         {"rope_type": "yarn", "factor": 10**400}, {"type": "dynamic", "factor": 1e30}, {"quant_method": []}],
    ),
)  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
def test_a_value_that_cannot_be_is_one_line(config: dict[str, Any], field: str, value: object) -> None:
    config.get("text_config", config)[field] = value
    with contextlib.suppress(ModelConfigError):
        read(config)
    with contextlib.suppress(ModelLoadError):
        arch_from_config(config, "config.json")


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForSequenceClassification",
        "Qwen2ForTokenClassification",
        "Qwen2RewardModel",
        "LlamaForQuestionAnswering",
    ],
)
def test_a_model_with_a_classification_head_is_told_what_it_is(architecture: str) -> None:
    with pytest.raises(ModelConfigError) as refused:
        read({**BASE, "model_type": "llama", "architectures": [architecture]})
    assert str(refused.value) == (
        f"config.json: architectures is {architecture}: this model classifies or scores text and generates none; give "
        "one whose architectures ends with ForCausalLM"
    )


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["LlamaModel"], [], None])
def test_a_model_that_generates_is_read(architectures: object) -> None:
    assert read({**BASE, "model_type": "llama", "architectures": architectures}).num_layers == 6


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}},
            },
            "fp8",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int"}}}}, "int8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"type": "int", "num_bits": 8}},
                    "b": {"weights": {"type": "int", "num_bits": 4}},
                },
            },
            "int4",
        ),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 3}, "int3"),
        ({"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:auto_gptq"}, "int2"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "nf4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "float", "num_bits": 4}}},
            },
            "fp4",
        ),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 64}}}, "int4"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2}}},
            "int4",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "FqnToConfig",
                        "_data": {
                            "fqn_to_config": {
                                "_default": {"_type": "Float8WeightOnlyConfig", "_version": 2},
                                "model.embed_tokens": {"_type": "IntxWeightOnlyConfig", "_version": 2},
                            }
                        },
                    }
                },
            },
            "fp8",
        ),
        (None, ""),
    ],
)
def test_quantization(section: object, expected: str) -> None:
    shape = read({**BASE, "model_type": "llama", "quantization_config": section})
    assert quantized_as(shape.fields) == expected


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "quip"}, "quant_method is quip"),
        ({"quant_method": "aqlm"}, r"AQLM \(quant_method aqlm\) is not run: choose"),
        ({"quant_method": "hqq"}, "quant_config is empty: download"),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 0}}},
            "4 bits along axis 0",
        ),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao whose quant_type is a name"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "X"}}}, "of X is not run, only Float8Weight"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, r"quark\) of fp4 is not run"),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}}, "of numbers in several steps is not"),
        ({"quant_method": "gptq", "bits": 16}, "bits is 16"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "modelopt of INT4_AWQ"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "float", "num_bits": 6}}},
            },
            "of fp6",
        ),
        ({}, "quant_method is not given"),
        ({"quant_method": "compressed-tensors"}, "of no groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"type": "int"}}, "b": {"weights": {"type": "float"}}},
            },
            "fp8, int8",
        ),
        ([], "must be an object"),
    ],
)
def test_quantization_that_is_not_run_is_refused_before_the_download(section: object, words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        quantized_as(read({**BASE, "model_type": "llama", "quantization_config": section}).fields)


@pytest.mark.parametrize("kind", ["mamba", "", None, "GEMMA2"])
def test_an_unknown_architecture_names_the_known_ones(kind: object) -> None:
    with pytest.raises(ModelConfigError, match=r"pagefleet runs bloom, .*, gemma2, gemma3, .*qwen3"):
        read({**BASE, "model_type": kind})


def test_an_unknown_rotation_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="rope_type is spiral; pagefleet knows default, linear"):
        read({**BASE, "model_type": "llama", "rope_scaling": {"type": "spiral"}})


def test_a_latent_stands_for_keys_and_values() -> None:
    """DeepSeek-V3 as published: 70.3 kB per token over 61 layers in two bytes, on every tensor rank."""
    kv = read({"model_type": "deepseek_v3"}).kv
    assert kv == KVSpec.latent(512, 64)
    assert 61 * kv.numbers * 2 == 70_272
    assert kv.of_rank(8) == kv
    assert KVSpec.pairs(8, 128).of_rank(4) == KVSpec.pairs(2, 128)


def test_a_latent_s_rotated_part_is_even() -> None:
    with pytest.raises(ModelConfigError, match="qk_rope_head_dim is 15, and must be even"):
        read({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "qk_rope_head_dim": 15})
