"""Reading config.json: spellings, defaults, windows, and one clear line for what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.rotary_frequencies import NO_ROPE, RopeParameters
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import arch_from_config, read_arch
from pagefleet_engine.models.model import MODEL_MODULES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
QWEN: dict[str, Any] = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128}


def arch(**changes: Any) -> ModelArch:
    return arch_from_config(LLAMA | changes, "config.json")


def test_an_old_llama_gets_its_defaults() -> None:
    found = arch()
    assert (found.num_kv_heads, found.head_dim, found.rms_norm_eps) == (32, 128, 1e-6)
    assert (found.ropes, found.layer_ropes) == ((RopeParameters(theta=10_000.0),), (0,) * 4)
    assert found.windows == (None,) * 4
    assert (found.tie_word_embeddings, found.attention_bias, found.mlp_bias) == (False, False, False)
    assert (found.eos_token_ids, found.dtype, found.context_length) == ((), "float32", 4096)


def test_null_counts_as_absent() -> None:
    assert arch(head_dim=None, num_key_value_heads=None, rope_scaling=None, sliding_window=None) == arch()


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_in_both_spellings(field: str) -> None:
    assert arch(**{field: "bfloat16"}).dtype == "bfloat16"
    assert arch(**{field: "torch.float16"}).dtype == "float16"


def test_qwen3_without_head_dim_has_128() -> None:
    assert arch(model_type="qwen3", hidden_size=4096, num_attention_heads=64).head_dim == 128


@pytest.mark.parametrize(
    ("scaling", "expected", "context_length"),
    [
        ({"rope_type": "default"}, RopeParameters(theta=500_000.0), 4096),
        ({"type": "linear", "factor": 4.0}, RopeParameters(rope_type="linear", theta=500_000.0, factor=4.0), 16384),
        (
            {"type": "dynamic", "factor": 2},
            RopeParameters(rope_type="dynamic", theta=500_000.0, factor=2.0, original_max_position=4096),
            8192,
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            RopeParameters(rope_type="llama3", theta=500_000.0, factor=8.0, original_max_position=1024),
            4096,
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "original_max_position_embeddings": 4096},
            RopeParameters(
                rope_type="yarn", theta=500_000.0, factor=4.0, original_max_position=4096, attention_factor=1.5
            ),
            16384,
        ),
    ],
)
def test_rope_in_both_spellings(scaling: dict[str, Any], expected: RopeParameters, context_length: int) -> None:
    old = arch(rope_theta=500_000.0, rope_scaling=scaling)
    new = arch(rope_parameters=scaling | {"rope_theta": 500_000.0})
    assert old.ropes == new.ropes == (expected,)
    assert old.context_length == new.context_length == context_length


def test_yarn_derives_its_attention_factor() -> None:
    rope = arch(rope_scaling={"rope_type": "yarn", "factor": 4.0}).ropes[0]
    assert rope.attention_factor == pytest.approx(1.138629, abs=1e-6)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate, rope.original_max_position) == (32.0, 1.0, True, 4096)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA | {"model_type": "mistral", "sliding_window": 64}, (64,) * 4),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        (LLAMA | {"sliding_window": 64}, (None,) * 4),
        (QWEN | {"max_window_layers": 3}, (None, None, None, 128)),
        (QWEN | {"max_window_layers": 0}, (128,) * 4),
        (QWEN, (None,) * 4),
        (QWEN | {"use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        (
            QWEN | {"layer_types": ["full_attention", "sliding_attention"] * 2, "max_window_layers": 0},
            (None, 128, None, 128),
        ),
    ],
)
def test_windows(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert arch_from_config(config, "config.json").windows == windows


def test_an_unknown_model_names_those_that_run() -> None:
    with pytest.raises(ModelLoadError) as error:
        arch(model_type="mamba")
    assert "mamba" in str(error.value)
    assert all(known in str(error.value) for known in MODEL_MODULES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": None}, "model_type is not given"),
        ({"hidden_size": None}, "hidden_size is None; it must be an integer"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be an integer from 1 to 4096"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"torch_dtype": 16}, "torch_dtype is 16; it must be a string"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2']; it must be a token id"),
        ({"num_key_value_heads": 5}, "32 heads of size 128 over 5 key/value heads"),
        ({"head_dim": 63}, "the size must be even"),
        ({"hidden_act": "mish"}, "hidden_act is mish; pagefleet runs silu, swish, gelu_pytorch_tanh, gelu_new"),
        ({"quantization_config": {"bits": 4}}, "quant_method is not given"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type is spiral; pagefleet knows default, linear, dynamic, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention are not supported"),
        ({"partial_rotary_factor": 0.305}, "rotates 39 of the 128 dimensions of a head; it must be an even number"),
        ({"partial_rotary_factor": 1.5}, "rotates 192 of the 128 dimensions"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 63}},
            "long_factor is [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...]; it must be a list of 64 positive numbers",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 63 + [0], "long_factor": [1.0] * 64}},
            "short_factor is",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 5, "high_freq_factor": 4}},
            "low_freq_factor must not be over high_freq_factor",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "it must be a list of 4 of full_attention, sliding_attention",
        ),
    ],
)
def test_a_wrong_value_is_one_line_that_names_file_and_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        arch(**changes)
    assert str(error.value).startswith("config.json: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_said_to_be_missing() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    with pytest.raises(ModelLoadError, match="vocab_size is missing; it must be an integer"):
        arch_from_config(config, "config.json")


def test_a_huge_value_is_shortened() -> None:
    with pytest.raises(ModelLoadError) as error:
        arch(eos_token_id=["x" * 1000] * 1000)
    assert len(str(error.value)) < 300


def test_end_of_text_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 7}))
    assert read_arch(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert read_arch(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[1]", "does not hold a JSON object"),
    ],
)
def test_an_unreadable_config(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=said) as error:
        read_arch(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_folders_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder"):
        read_arch(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="the folder is empty"):
        read_arch(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="that file is missing"):
        read_arch(tmp_path)


PHI3: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    "partial_rotary_factor": 0.75,
}


def read(**config: Any) -> ModelArch:
    return arch_from_config(config, "config.json")


@pytest.mark.parametrize(
    ("model_type", "config_class"),
    [
        ("bloom", "BloomConfig"),
        ("cohere", "CohereConfig"),
        ("cohere2", "Cohere2Config"),
        ("ernie4_5", "Ernie4_5Config"),
        ("ernie4_5_moe", "Ernie4_5_MoeConfig"),
        ("exaone4", "Exaone4Config"),
        ("falcon", "FalconConfig"),
        ("gemma", "GemmaConfig"),
        ("gemma2", "Gemma2Config"),
        ("gemma3_text", "Gemma3TextConfig"),
        ("gemma3n_text", "Gemma3nTextConfig"),
        ("gpt2", "GPT2Config"),
        ("gpt_oss", "GptOssConfig"),
        ("granite", "GraniteConfig"),
        ("hunyuan_v1_dense", "HunYuanDenseV1Config"),
        ("hunyuan_v1_moe", "HunYuanMoEV1Config"),
        ("llama4_text", "Llama4TextConfig"),
        ("glm", "GlmConfig"),
        ("glm4", "Glm4Config"),
        ("glm4_moe_lite", "Glm4MoeLiteConfig"),
        ("minimax_m2", "MiniMaxM2Config"),
        ("mpt", "MptConfig"),
        ("olmo2", "Olmo2Config"),
        ("olmo3", "Olmo3Config"),
        ("opt", "OPTConfig"),
        ("phi", "PhiConfig"),
        ("phi3", "Phi3Config"),
        ("phimoe", "PhimoeConfig"),
        ("seed_oss", "SeedOssConfig"),
        ("smollm3", "SmolLM3Config"),
        ("stablelm", "StableLmConfig"),
    ],
)
def test_an_empty_configuration_is_what_transformers_makes_of_it(model_type: str, config_class: str) -> None:
    full = getattr(transformers, config_class)().to_dict()
    assert read(model_type=model_type) == read(**full)


def test_gemma2_slides_in_every_other_layer_and_caps_scores_and_logits() -> None:
    found = read(model_type="gemma2", num_hidden_layers=3, query_pre_attn_scalar=144, sliding_window=64)
    assert found.windows == (64, None, 64)
    assert (found.query_scale, found.attention_softcap, found.final_softcap) == (1 / 12, 50.0, 30.0)
    assert (found.head_dim, found.activation, found.tie_word_embeddings) == (256, "gelu_tanh", True)
    uncapped = read(model_type="gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_softcap, uncapped.final_softcap) == (None, None)


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 20_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            }
        },
    ],
)
def test_gemma3_rotates_its_two_kinds_of_layers_differently(spelling: dict[str, Any]) -> None:
    found = read(model_type="gemma3_text", num_hidden_layers=7, sliding_window=512, **spelling)
    slow = RopeParameters(rope_type="linear", factor=8.0, theta=500_000.0)
    assert found.ropes == (slow, RopeParameters(theta=20_000.0))
    assert found.layer_ropes == (1, 1, 1, 1, 1, 0, 1)
    assert found.windows == (512, 512, 512, 512, 512, None, 512)
    # Its 131,072 positions are after the stretching.
    assert (found.context_length, found.default_length) == (131_072, 131_072)


def test_gemma3n_is_read_as_published() -> None:
    """E4B: of text, images and sound, with a width for each layer."""
    text = {"model_type": "gemma3n_text", "intermediate_size": [16_384] * 35, "eos_token_id": [1, 106]}
    found = read(model_type="gemma3n", text_config=text, eos_token_id=1, vision_config={}, audio_config={})
    assert (found.intermediate_size, found.query_scale, found.final_softcap) == (16_384, 1.0, 30.0)
    assert found.kept_windows == ((512,) * 4 + (None,)) * 4
    assert found.layer_ropes[:5] == (1, 1, 1, 1, 0)
    assert [rope.theta for rope in found.ropes] == [1e6, 1e4]
    assert found.altup is not None
    assert found.altup.sparsity == (0.95,) * 10 + (0.0,) * 25
    assert found.eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"intermediate_size": [64, 64, 128, 64]},
            r"intermediate_size is \[64, 64, 128, 64\]; it must be one positive integer, or 4 times the same",
        ),
        ({"activation_sparsity_pattern": [0.95]}, "must be a list of 4 numbers from 0 to under 1"),
        ({"activation_sparsity_pattern": [1.0] * 4}, "must be a list of 4 numbers from 0 to under 1"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4; it must be an integer from 0 to 3"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, and the 4 layers then lack one before these of each"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4"),
    ],
)
def test_gemma3n_with_fields_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 2}
    with pytest.raises(ModelLoadError, match=said):
        read(**(config | changes))


def test_gemma3_reads_the_pattern_of_its_layers() -> None:
    assert read(model_type="gemma3_text", num_hidden_layers=4, sliding_window_pattern=2).layer_ropes == (1, 0, 1, 0)
    kinds = ["full_attention", "sliding_attention"]
    assert read(model_type="gemma3_text", num_hidden_layers=2, layer_types=kinds).layer_ropes == (0, 1)
    assert [rope.theta for rope in read(model_type="gemma3_text").ropes] == [1_000_000.0, 10_000.0]


def test_gemma3_for_images_is_its_text_model() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 2, "sliding_window": 1024}
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {}}
    found = read(**outer, text_config=text)
    alone = read(**text)
    assert found == replace(alone, model_type="gemma3", eos_token_ids=(1, 106), dtype="bfloat16")
    with pytest.raises(ModelLoadError, match=r"^config.json: text_config: hidden_size is 0"):
        read(**outer, text_config=text | {"hidden_size": 0})


def test_phi3_serves_its_first_context_unless_asked_for_more() -> None:
    found = read(**PHI3)
    assert (found.default_length, found.context_length) == (4096, 131_072)
    assert found.ropes[0].rotary_dim(found.head_dim) == 12
    short, longer = found.for_length(4096), found.for_length(4097)
    assert (short.context_length, short.ropes[0].longest, short.windows) == (4096, 4096, (None, None))
    assert longer.ropes[0].longest == 4097
    assert read(**PHI3 | {"rope_scaling": PHI3["rope_scaling"] | {"type": "su"}}).ropes == found.ropes


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    found = arch(model_type="mistral", sliding_window=64)
    assert found.for_length(65).windows == (64,) * 4
    assert found.for_length(64).windows == (None,) * 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention is True; pagefleet",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0; pagefleet runs",
        ),
        ({"model_type": "gemma2", "hidden_activation": "mish"}, "hidden_activation is mish; pagefleet runs silu"),
        (
            {"model_type": "gemma2", "final_logit_softcapping": -1},
            "final_logit_softcapping is -1; it must be a positive",
        ),
        (
            {"model_type": "gemma2", "query_pre_attn_scalar": 0},
            "query_pre_attn_scalar is 0; it must be a positive number",
        ),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is None; it must be an integer from 1"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}},
            "for each of full_attention, sliding",
        ),
        ({"model_type": "gemma3", "text_config": []}, "text_config is []; it must be an object"),
        (
            PHI3 | {"original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; it must be an integer from 2",
        ),
        (PHI3 | {"rope_scaling": {"type": "longrope"}}, "short_factor is missing; it must be a list of 6 positive"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is True; pagefleet runs"),
        ({"model_type": "opt", "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is false"),
        (
            {"model_type": "bloom", "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True",
        ),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm is True; pagefleet runs"),
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias is true; pagefleet runs Seed-OSS"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias is True; pagefleet runs"),
        ({"model_type": "minimax_m2", "use_qk_norm": False}, "use_qk_norm must be true and qk_norm_type per_layer"),
        ({"model_type": "phimoe", "num_experts_per_tok": 3}, "num_experts_per_tok is 3; SparseMixer chooses 2"),
        (
            {"model_type": "llama4_text", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is yarn; with use_qk_norm pagefleet runs default, linear, dynamic and llama3",
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, "attention_chunk_size is None; it must be an"),
        ({"model_type": "llama4_text", "attn_temperature_tuning": "on"}, "attn_temperature_tuning is 'on'; it must be"),
        ({"model_type": "cohere2", "sliding_window": None}, "sliding_window is None; it must be an integer"),
        ({"model_type": "falcon", "activation": "mish"}, "activation is mish; pagefleet runs silu"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "pagefleet runs MPT with ALiBi, multihead_attention"),
        ({"model_type": "mpt", "attn_config": {"qk_ln": True}}, "attn_config: qk_ln is True"),
    ],
)
def test_a_wrong_value_of_a_family_is_one_line(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(**config)
    assert str(error.value).startswith("config.json: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_phimoe_rotates_long_contexts_with_a_magnitude_of_their_own() -> None:
    rope: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope |= {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 4096}
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    found = read(model_type="phimoe", rope_scaling=rope, **heads)
    assert (found.context_length, found.default_length) == (131_072, 4096)
    assert found.for_length(4096).ropes[0].magnitude == 1.1
    assert found.for_length(4097).ropes[0].magnitude == 1.3


def test_gpt_oss_is_read_as_published() -> None:
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}
    rope |= {"original_max_position_embeddings": 4096}
    found = read(model_type="gpt_oss", rope_theta=150_000, rope_scaling=rope)
    assert found.ropes[0].theta == 150_000
    assert found.ropes[0].magnitude == pytest.approx(1.3466, abs=1e-4)
    assert found.context_length == 131_072
    assert found == read(model_type="gpt_oss")


def test_llama4_is_read_as_published() -> None:
    """Scout, whose first files have a number for what is a flag now."""
    rope = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    rope |= {"original_max_position_embeddings": 8192}
    text = {"model_type": "llama4_text", "num_hidden_layers": 8, "rope_scaling": rope, "attn_temperature_tuning": 4}
    outer = {"model_type": "llama4", "eos_token_id": [200001, 2], "torch_dtype": "bfloat16", "vision_config": {}}
    found = read(**outer, text_config=text)
    assert found == replace(read(**text), model_type="llama4", eos_token_ids=(200001, 2), dtype="bfloat16")
    assert found.chunked
    assert found.windows == (8192, 8192, 8192, None) * 2
    assert found.layer_ropes == (0, 0, 0, 1) * 2
    assert (found.ropes[1].query_growth, found.ropes[1].growth_step) == (0.1, 8192)
    assert found.for_length(8192).windows == (None,) * 8
    assert found.experts is not None
    assert (found.intermediate_size, found.experts.intermediate_size) == (16384, 8192)
    maverick = read(model_type="llama4_text", interleave_moe_layer_step=2, attn_temperature_tuning=0).experts
    assert maverick is not None
    assert maverick.layers == (False, True) * 24
    assert read(**text | {"attn_temperature_tuning": 0}).ropes[1] == NO_ROPE


def test_cohere2_rotates_where_there_is_a_window() -> None:
    found = read(model_type="cohere2", num_hidden_layers=5)
    assert found.windows == (4096, 4096, 4096, None, 4096)
    assert found.layer_ropes == (0, 0, 0, 1, 0)
    assert found.ropes[1].rope_type == "none"
