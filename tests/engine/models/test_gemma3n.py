"""Gemma 3n as it is published: with images and sound beside it, and matrices that its last layers do not need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model
from pagefleet_engine.worker.worker import Worker
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.checkpoints import reference_model
from tests.fakes.dense_attention import DenseSequence, DenseStep

Make = Callable[..., Path]
CPU = torch.device("cpu")
TOKENS = torch.arange(3, 43)
FAMILY = "gemma3n_text"


def load(folder: Path) -> Model:
    return load_model(folder, read_arch(folder), Placement(torch.float32, CPU, use_kernels=False), "auto", 0)


@torch.inference_mode()
def logits(model: Model) -> Tensor:
    step = DenseStep([(DenseSequence(), len(TOKENS))])
    return model.logits(model.forward(TOKENS, torch.arange(len(TOKENS)), step))


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object], config: dict[str, Any]) -> Path:
    """A copy with other tensors and another configuration."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@torch.inference_mode()
def test_the_text_of_a_checkpoint_with_images_and_sound(make_checkpoint: Make, tmp_path: Path) -> None:
    """In its names, and with the keys and values of layers that read others'."""
    text = make_checkpoint(FAMILY, tie_word_embeddings=True)

    def publish(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        for part in ("vision_tower.stem", "embed_vision.norm", "audio_tower.norm", "embed_audio.norm"):
            tensors[f"model.{part}.weight"] = torch.ones(2)
        for layer in (3, 4):
            for name in ("k_proj", "v_proj", "k_norm"):
                tensors[f"model.language_model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(2)

    config = {"model_type": "gemma3n", "text_config": config_of(text), "tie_word_embeddings": True}
    folder = changed(text, tmp_path / "model", publish, config)
    expected = reference_model(text)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(load(folder)), expected, atol=1e-4, rtol=0)


def test_keys_of_a_layer_that_keeps_them_are_needed(make_checkpoint: Make, tmp_path: Path) -> None:
    source, name = make_checkpoint(FAMILY), "model.layers.2.self_attn.k_proj.weight"
    folder = changed(source, tmp_path / "model", lambda tensors: tensors.pop(name), config_of(source))
    with pytest.raises(ModelLoadError, match=f"the weights lack {name}: download the checkpoint again"):
        load(folder)


def test_two_of_five_layers_have_no_pages(make_checkpoint: Make) -> None:
    """Three keep keys and values: two heads of 32 numbers each."""
    folder = make_checkpoint(FAMILY)
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu", num_threads=1, max_model_len=256)
    worker = Worker(EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=200)), folder, read_arch(folder))
    groups = group_layers((24, None, 24))
    assert worker.kv_groups == groups
    assert worker.pages.bytes_per_block == groups.layers_per_block * 2 * 2 * 32 * 4 * worker.cache.block_size


def test_a_layer_reads_the_last_one_of_its_kind(make_checkpoint: Make) -> None:
    """Also where windows are as long as what is served, so that all layers see everything."""
    folder = make_checkpoint(FAMILY)
    arch = read_arch(folder).for_length(16)
    assert arch.kept_windows == (None, None, None)
    seen: list[tuple[str, int]] = []

    class Step(DenseStep):
        def write(self, spec: Any, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
            seen.append(("write", spec.layer))
            super().write(spec, k_TKH, v_TKH)

        def attend(self, spec: Any, q_TNH: Tensor) -> Tensor:
            seen.append(("attend", spec.layer))
            return super().attend(spec, q_TNH)

    model = load_model(folder, arch, Placement(torch.float32, CPU, use_kernels=False), "auto", 0)
    with torch.inference_mode():
        model.forward(TOKENS[:9], torch.arange(9), Step([(DenseSequence(), 9)]))
    own = [(what, layer) for layer in range(3) for what in ("write", "attend")]
    assert seen == [*own, ("attend", 1), ("attend", 2)]


def generate(folder: Path, **settings: Any) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's were not computed."""
    fixed: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 64, "num_threads": 1}
    with LLM(str(folder), skip_tokenizer_init=True, **fixed, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": list(range(3, 103))}], params, use_tqdm=False)
    return [*result.outputs[0].token_ids], result.num_cached_tokens or 0


def test_what_is_kept_is_all_that_another_engine_needs(make_checkpoint: Make, tmp_path: Path) -> None:
    """Also one of two ranks, which have a head each."""
    folder, kept = make_checkpoint(FAMILY), {"kv_connector": "file", "kv_offload_dir": str(tmp_path)}
    alone = generate(folder)
    assert generate(folder, **kept) == alone
    assert generate(folder, **kept, tensor_parallel_size=2) == (alone[0], 96)
