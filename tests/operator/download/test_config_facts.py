"""Facts from a configuration are what the engine reads from it, for every architecture and every spelling."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.models.config_file import arch_from_config
from pagefleet_operator.download.config_facts import ConfigFacts, read_config, supported_architectures
from pagefleet_operator.download.errors import BadModel

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


def facts_of(config: dict[str, Any]) -> ConfigFacts:
    return read_config(config, "config.json")


def from_engine(config: dict[str, Any]) -> tuple[object, ...]:
    arch = arch_from_config(config, "config.json")
    windows = {window for window in arch.windows if window is not None}
    assert len(windows) <= 1, "a fact that one number cannot tell"
    return (
        arch.model_type,
        arch.num_layers,
        arch.num_heads,
        arch.num_kv_heads,
        arch.head_dim,
        arch.context_length,
        arch.default_length,
        sum(window is not None for window in arch.windows),
        windows.pop() if windows else 0,
        arch.dtype,
    )


def from_facts(config: dict[str, Any]) -> tuple[object, ...]:
    facts = facts_of(config)
    return (
        facts.architecture,
        facts.num_layers,
        facts.num_attention_heads,
        facts.num_kv_heads,
        facts.head_dim,
        facts.max_position_embeddings,
        facts.default_length,
        facts.num_window_layers,
        facts.window,
        facts.dtype,
    )


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
    kind = draw(st.sampled_from(supported_architectures()))
    num_layers = draw(st.integers(1, 40))
    config = {**BASE, "model_type": kind, "num_hidden_layers": num_layers}
    config["num_key_value_heads"] = draw(st.sampled_from([1, 2, 4]))
    config["head_dim"] = draw(st.sampled_from([16, 16, 16, None]))
    config["sliding_window"] = draw(st.sampled_from([None, 32, 64])) if not kind.startswith("gemma") else 64
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
    if draw(st.booleans()) and not kind.startswith("gemma"):
        del config["sliding_window"]
    if kind.startswith("gemma3"):
        config |= draw(st.sampled_from([{}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}]))
    else:
        config |= draw(ropes())
    if kind == "gemma3":
        outside = {name: config.pop(name) for name in ("dtype", "torch_dtype") if name in config}
        return {"model_type": "gemma3", "text_config": config | {"model_type": "gemma3_text"}} | outside
    return config


@given(configs())
@settings(max_examples=examples(150), deadline=None)
def test_facts_are_what_the_engine_reads(config: dict[str, Any]) -> None:
    assert from_facts(config) == from_engine(config)


@pytest.mark.parametrize(
    "kind", sorted(set(supported_architectures()) - {"gemma3", "llama", "mistral", "qwen2", "qwen3"})
)
def test_what_a_configuration_leaves_out_is_as_in_the_engine(kind: str) -> None:
    config = {"model_type": kind, "vocab_size": 300, "intermediate_size": 128}
    assert from_facts(config) == from_engine(config)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_of_heads_and_windows_are_as_in_the_engine(kind: str) -> None:
    left_out = ("num_key_value_heads", "sliding_window")
    config = {**BASE, "model_type": kind, "num_attention_heads": 32, "hidden_size": 512, "use_sliding_window": True}
    config = {name: value for name, value in config.items() if name not in left_out}
    assert from_facts(config) == from_engine(config)


@given(
    configs(),
    st.sampled_from(["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"]),
    st.sampled_from([0, -1, 3, 2**31, "4", 1.5, True, [], {}]),
)
@settings(max_examples=examples(100), deadline=None)
def test_a_value_that_cannot_be_is_refused_where_the_engine_refuses_it(
    config: dict[str, Any], field: str, value: object
) -> None:
    config.get("text_config", config)[field] = value
    try:
        expected = from_engine(config)
    except ModelLoadError:
        with pytest.raises(BadModel, match=r"config\.json"):
            facts_of(config)
    else:
        assert from_facts(config) == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}},
            },
            "fp8",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int"}}}}, "int8"),
        (None, ""),
    ],
)
def test_quantization(section: object, expected: str) -> None:
    assert facts_of({**BASE, "model_type": "llama", "quantization_config": section}).quantization == expected


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "awq"}, "quant_method is awq"),
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
    with pytest.raises(BadModel, match=words):
        facts_of({**BASE, "model_type": "llama", "quantization_config": section})


@pytest.mark.parametrize("kind", ["mixtral", "", None, "GEMMA2"])
def test_an_unknown_architecture_names_the_known_ones(kind: object) -> None:
    with pytest.raises(BadModel, match=r"pagefleet runs gemma2, gemma3, .*qwen3"):
        facts_of({**BASE, "model_type": kind})


def test_an_unknown_rotation_is_refused() -> None:
    with pytest.raises(BadModel, match="rope_type is spiral; pagefleet knows default, linear"):
        facts_of({**BASE, "model_type": "llama", "rope_scaling": {"type": "spiral"}})


def test_a_context_that_needs_no_caution_is_told_once() -> None:
    plain = facts_of({**BASE, "model_type": "llama"}).of_model(revision="r", weights_bytes=1, num_files=2)
    assert (plain.max_position_embeddings, plain.default_length) == (512, 0)
    longrope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {**BASE, "model_type": "phi3", "original_max_position_embeddings": 128, "rope_scaling": longrope}
    longer = facts_of(config).of_model(revision="r", weights_bytes=1, num_files=2)
    assert (longer.max_position_embeddings, longer.default_length) == (512, 128)
