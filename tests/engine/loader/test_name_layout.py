"""A text model that is part of a checkpoint for text and images loads as it would alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.safetensors import fill_from_safetensors, layout_of
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.dense_attention import DenseSequence, DenseStep

AROUND = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
WITHIN = {"model.": "model.language_model."}
VISION = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


@torch.inference_mode()
def logits(folder: Path, tokens: Tensor) -> Tensor:
    arch = read_arch(folder)
    model = build_model(arch, Placement(torch.float32, torch.device("cpu"), use_kernels=False))
    fill_from_safetensors(folder, weight_map(model.weights()), arch.tie_word_embeddings)
    step = DenseStep([(DenseSequence(), len(tokens))])
    return model.logits(model.forward(tokens, torch.arange(len(tokens)), step))


def write_multimodal(text_folder: Path, folder: Path, prefixes: dict[str, str], extra: tuple[str, ...]) -> None:
    """The text checkpoint's tensors under other names, with more tensors beside them."""
    tensors = {name: torch.ones(2) for name in extra}
    for name, tensor in load_file(text_folder / "model.safetensors").items():
        start = next((ours for ours in prefixes if name.startswith(ours)), "")
        tensors[prefixes.get(start, "") + name.removeprefix(start)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "gemma3", "text_config": json.loads((text_folder / "config.json").read_text())}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


@pytest.mark.parametrize(
    ("prefixes", "extra"),
    [
        (AROUND, ("vision_tower.embeddings.weight", "multi_modal_projector.norm.weight")),
        (WITHIN, ("model.vision_tower.embeddings.weight", "model.multi_modal_projector.norm.weight")),
        (AROUND, ("vision_tower.embeddings.weight", "language_model.lm_head.weight")),
    ],
    ids=["around", "within", "with its tied head"],
)
def test_both_layouts_give_the_text_model(
    prefixes: dict[str, str], extra: tuple[str, ...], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    text = make_checkpoint("gemma3_text", tie_word_embeddings=True)
    write_multimodal(text, tmp_path, prefixes, extra)
    tokens = torch.arange(3, 40)
    assert torch.equal(logits(tmp_path, tokens), logits(text, tokens))


def test_what_is_of_neither_part_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    text = make_checkpoint("gemma3_text", tie_word_embeddings=True)
    write_multimodal(text, tmp_path, AROUND, ("audio_tower.weight",))
    with pytest.raises(ModelLoadError, match=r"no place in the model for audio_tower\.weight"):
        logits(tmp_path, torch.arange(3))


def test_a_checkpoint_of_text_and_images_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION | {"num_hidden_layers": 1}, mm_tokens_per_image=4, image_token_index=63
    )
    assert_logits_are_of_transformers(tmp_path, transformers.Gemma3ForConditionalGeneration(config))


def assert_logits_are_of_transformers(folder: Path, reference: Any) -> None:
    torch.manual_seed(0)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    reference.eval().save_pretrained(folder)
    tokens = torch.arange(3, 30)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    torch.testing.assert_close(logits(folder, tokens), expected, atol=1e-4, rtol=0)


def test_llama4_of_text_and_images_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    text = transformers.Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        intermediate_size_mlp=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_chunk_size=8,
        num_local_experts=3,
        interleave_moe_layer_step=2,
        pad_token_id=0,
    )
    vision: dict[str, Any] = VISION | {"num_hidden_layers": 1, "vision_output_dim": 16, "projector_input_dim": 16}
    vision |= {"projector_output_dim": 16, "pixel_shuffle_ratio": 1.0}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    assert_logits_are_of_transformers(tmp_path, transformers.Llama4ForConditionalGeneration(config))


def test_a_text_model_alone_keeps_its_names() -> None:
    layout = layout_of(
        ["lm_head.weight", "model.embed_tokens.weight", "vision_tower.weight"], ["model.embed_tokens.weight"]
    )
    assert layout.stored_name("model.norm.weight") == "model.norm.weight"
    assert layout.foreign == ()


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt"])
def test_a_model_saved_without_a_head_has_no_prefix(
    family: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As GPT-2, BLOOM and OPT are published; GPT-2 with the masks of its attention."""
    folder = make_checkpoint(family, tie_word_embeddings=True)
    base = "model." if family == "opt" else "transformer."
    tensors = {name.removeprefix(base): value for name, value in load_file(folder / "model.safetensors").items()}
    if family == "gpt2":
        tensors |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tokens = torch.arange(3, 30)
    assert torch.equal(logits(tmp_path, tokens), logits(folder, tokens))
    del tensors[min(name for name in tensors if name.endswith("c_attn.weight") or "query" in name or "q_proj" in name)]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"the weights lack (decoder\.layers|h)\.0\.\S+: download"):
        logits(tmp_path, tokens)
