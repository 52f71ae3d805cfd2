"""Each architecture against transformers: same checkpoint, same tokens, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model

from tests.fakes.checkpoints import LONGROPE, reference_model
from tests.fakes.dense_attention import DenseSequence, DenseStep

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}

# Six pairs of a head of 16 rotate.
PHI4_MINI = {
    "partial_rotary_factor": 0.75,
    "rope_parameters": LONGROPE | {name: LONGROPE[name][:6] for name in ("short_factor", "long_factor")},
}

WHOLE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}

FALCON_11B = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 greedy": ("deepseek_v2", {"topk_method": "greedy", "n_shared_experts": 1, "rope_parameters": None}),
    "deepseek_v2 query latents": (
        "deepseek_v2",
        {"q_lora_rank": 40, "attention_bias": True, "first_k_dense_replace": 0},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}),
    "deepseek_v3 one group": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "llama": ("llama", {}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head size": ("llama", {"head_dim": 32}),
    "llama rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "llama rope dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama rope yarn": ("llama", {"rope_parameters": YARN}),
    "llama rope yarn mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    "llama rope yarn bounds": ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "truncate": False}}),
    "mistral": ("mistral", {}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2 layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 biases": ("gemma2", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma2 layer types": ("gemma2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    "gemma3": ("gemma3_text", {}),
    "gemma3 final cap": ("gemma3_text", {"final_logit_softcapping": 5.0, "tie_word_embeddings": True}),
    "gemma3n_text": ("gemma3n_text", {}),
    "gemma3n_text all keep": ("gemma3n_text", {"num_kv_shared_layers": 0, "attention_bias": True}),
    "gemma3n_text other version": (
        "gemma3n_text",
        {"altup_active_idx": 1, "altup_correct_scale": False, "tie_word_embeddings": True},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "phi3 no window": ("phi3", {"sliding_window": None, "rope_parameters": None}),
    "phi4 mini": ("phi3", PHI4_MINI | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe biases": ("glm4_moe", {"attention_bias": True, "use_qk_norm": False, "norm_topk_prob": False}),
    "glm4_moe two dense": (
        "glm4_moe",
        {"first_k_dense_replace": 2, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite dense in the middle": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "rope_parameters": None},
    ),
    "dots1": ("dots1", {}),
    "dots1 biases": ("dots1", {"attention_bias": True, "n_shared_experts": 2, "n_group": 4, "topk_group": 2}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5 biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe some layers": (
        "ernie4_5_moe",
        {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    ),
    "exaone4": ("exaone4", {}),
    "exaone4 no window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_dense biases": ("hunyuan_v1_dense", {"attention_bias": True, "tie_word_embeddings": True}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
    "hunyuan_v1_moe all layers say": ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2], "attention_bias": True}),
    "glm": ("glm", {}),
    "glm no biases": ("glm", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4 whole rotation": ("glm4", {"attention_bias": False, "rope_parameters": WHOLE}),
    "olmo3": ("olmo3", {}),
    "olmo3 biases": ("olmo3", {"attention_bias": True, "rope_parameters": None, "layer_types": None}),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2 whole rotation": ("minimax_m2", {"rope_parameters": None, "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {}),
    "seed_oss other biases": ("seed_oss", {"attention_bias": False, "mlp_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3 windows": (
        "smollm3",
        {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 16, "attention_bias": True},
    ),
    "granitemoe": ("granitemoe", {}),
    "granitemoe biases": ("granitemoe", {"attention_bias": True, "residual_multiplier": 1.0}),
    "mixtral": ("mixtral", {}),
    "mixtral no window": ("mixtral", {"sliding_window": None, "head_dim": 32}),
    "olmoe": ("olmoe", {}),
    "olmoe renormalised": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe some layers": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe windows": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe some layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
    "gpt2": ("gpt2", {}),
    "gpt2 tied": ("gpt2", {"tie_word_embeddings": True, "activation_function": "relu", "scale_attn_weights": False}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss no biases": ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention"] * 3}),
    "llama4": ("llama4_text", {}),
    "llama4 scout": (
        "llama4_text",
        {
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": None,
            "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0},
        },
    ),
    "llama4 plain": (
        "llama4_text",
        {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "chunked_attention"] * 2,
            "moe_layers": [0],
        },
    ),
    "opt": ("opt", {}),
    "opt 350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt no biases": ("opt", {"enable_bias": False, "tie_word_embeddings": True}),
    "bloom": ("bloom", {}),
    "bloom six heads": ("bloom", {"num_attention_heads": 6, "hidden_size": 96, "tie_word_embeddings": True}),
    "falcon": ("falcon", {}),
    "falcon 40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": ("falcon", FALCON_11B),
    "falcon rw": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon rotated": ("falcon", {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 96}),
    "mpt": ("mpt", {}),
    "mpt six heads": ("mpt", {"num_attention_heads": 6, "hidden_size": 96}),
    "cohere": ("cohere", {}),
    "cohere r+": ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {}),
    "cohere2 pattern": ("cohere2", {"layer_types": None, "sliding_window_pattern": 2, "attention_bias": True}),
    "gemma": ("gemma", {}),
    "gemma first files": ("gemma", {"hidden_act": "gelu", "attention_bias": True, "num_key_value_heads": 1}),
    "granite": ("granite", {}),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 1.0}),
    "phi": ("phi", {}),
    "phi 2": ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}}),
    "phimoe": ("phimoe", {}),
    "phimoe no biases": ("phimoe", {"attention_bias": False, "lm_head_bias": False, "sliding_window": 16}),
    "stablelm": ("stablelm", {}),
    "stablelm 12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "mpt clipped": ("mpt", {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3}}),
}
"""Name -> family and configuration. Windows are shorter than the longest prompt."""

PROMPT_LENGTHS = (1, 7, 25, 90)


def load(folder: Path, arch: ModelArch | None = None) -> Model:
    return load_model(
        folder, arch or read_arch(folder), Placement(torch.float32, torch.device("cpu"), False), "auto", 0
    )


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 320, (length,), generator=generator) for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_match_transformers(case: str, make_checkpoint: Callable[..., Path]) -> None:
    family, config = CASES[case]
    folder = make_checkpoint(family, **config)
    model, reference = load(folder), reference_model(folder)
    for prompt in prompts():
        hidden = model.forward(prompt, torch.arange(len(prompt)), DenseStep([(DenseSequence(), len(prompt))]))
        torch.testing.assert_close(model.logits(hidden), reference(prompt[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [*(case for case in CASES if " " not in case), "llama rope dynamic", "qwen2 windows"])
@torch.inference_mode()
def test_greedy_tokens_match_transformers(case: str, make_checkpoint: Callable[..., Path]) -> None:
    """64 tokens for all prompts at once: the first step is ragged, the others one token each."""
    family, config = CASES[case]
    folder = make_checkpoint(family, **config)
    model, reference = load(folder), reference_model(folder)
    sequences = [DenseSequence() for _ in PROMPT_LENGTHS]
    pending, texts = prompts(), prompts()
    for _ in range(64):
        positions = torch.cat([torch.arange(len(t) - len(p), len(t)) for t, p in zip(texts, pending, strict=True)])
        step = DenseStep([(s, len(p)) for s, p in zip(sequences, pending, strict=True)])
        hidden = model.forward(torch.cat(pending), positions, step)
        ends = torch.tensor([len(p) for p in pending]).cumsum(0) - 1
        pending = list(model.logits(hidden[ends]).argmax(-1, keepdim=True))
        texts = [torch.cat(pair) for pair in zip(texts, pending, strict=True)]
    ties = [first_tie(prompt, text, reference) for prompt, text in zip(prompts(), texts, strict=True)]
    assert sum(tie is not None for tie in ties) <= 1, f"texts part at {ties}"


def first_tie(prompt: torch.Tensor, text: torch.Tensor, reference: Any) -> int | None:
    """Where `text` leaves transformers' greedy text; fails unless both choices have the same logit there."""
    expected = reference.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0]
    assert len(text) == len(expected) == len(prompt) + 64
    differences = (text != expected).nonzero()
    if len(differences) == 0:
        return None
    at = int(differences[0])
    logits = reference(expected[None, :at]).logits[0, -1]
    torch.testing.assert_close(logits[text[at]], logits[expected[at]], atol=2e-5, rtol=0)
    return at


@torch.inference_mode()
def test_dynamic_rope_decodes_past_the_trained_context(make_checkpoint: Callable[..., Path]) -> None:
    """A position over max_position_embeddings gets the base of a context that ends there, as when decoding by token."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = make_checkpoint("llama", max_position_embeddings=32, rope_parameters=rope)
    model, reference = load(folder), reference_model(folder)
    prompt = prompts()[2]
    sequence, cache, text = DenseSequence(), None, prompt
    pending = prompt
    for _ in range(30):
        positions = torch.arange(len(text) - len(pending), len(text))
        ours = model.logits(model.forward(pending, positions, DenseStep([(sequence, len(pending))]))[-1:])
        theirs = reference(pending[None], past_key_values=cache, use_cache=True)
        cache = theirs.past_key_values
        torch.testing.assert_close(ours, theirs.logits[0, -1:], atol=1e-4, rtol=0)
        pending = ours.argmax(-1)
        text = torch.cat((text, pending))
    assert len(text) > 32


@pytest.mark.parametrize("partial", [False, True])
@torch.inference_mode()
def test_long_factors_are_for_a_long_context(partial: bool, make_checkpoint: Callable[..., Path]) -> None:
    """Served with more than the first 16 positions, every prompt is rotated as transformers rotates long ones."""
    folder = make_checkpoint("phi3", original_max_position_embeddings=16, **(PHI4_MINI if partial else {}))
    model = load(folder, read_arch(folder).for_length(512))
    reference = reference_model(folder)
    for prompt in prompts()[2:]:
        hidden = model.forward(prompt, torch.arange(len(prompt)), DenseStep([(DenseSequence(), len(prompt))]))
        torch.testing.assert_close(model.logits(hidden), reference(prompt[None]).logits[0], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_chunks_of_a_prompt_give_the_same_hidden_states(make_checkpoint: Callable[..., Path]) -> None:
    model = load(make_checkpoint("mistral"))
    prompt = prompts()[-1]
    whole = model.forward(prompt, torch.arange(90), DenseStep([(DenseSequence(), 90)]))
    sequence = DenseSequence()
    pieces = []
    for start in range(0, 90, 13):
        ids = prompt[start : start + 13]
        positions = torch.arange(start, start + len(ids))
        pieces.append(model.forward(ids, positions, DenseStep([(sequence, len(ids))])))
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=0)
