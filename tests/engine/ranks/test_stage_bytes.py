"""What is told of a model's stages before it is downloaded, against what each stage of an engine takes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagefleet_download.download import inspect
from pagefleet_download.progress import ProgressMeter
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_operator.plan.stage_shares import latest_stage, stage_shares
from pagefleet_protocol.model_facts import MAX_RESULT_BYTES, DownloadResult, ModelFacts, encode_result
from safetensors.torch import load_file, save_file

from tests.engine.ranks.test_stages import GEMMA3N
from tests.fakes.downloads import fast


def look(folder: Path) -> DownloadResult:
    return asyncio.run(inspect(folder.as_uri(), fast(), ProgressMeter()))


def facts_of(folder: Path) -> ModelFacts:
    facts = look(folder).facts
    assert facts is not None
    return facts


def bytes_of_stages(folder: Path, stages: int) -> list[int]:
    """What the weights of each take in an engine."""
    arch = read_arch(folder)
    place = Placement(torch.float32, torch.device("cpu"), use_kernels=False)
    found = []
    for layers in arch.stage_layers(Parallelism(pipeline_parallel_size=stages)):
        model = build_model(arch, replace(place, layers=layers))
        found.append(sum(weight.nbytes for _, weight in model.weights()))
    return found


@pytest.mark.parametrize(("tied", "shared"), [*itertools.product([True, False], [0, 2])])
def test_each_stage_takes_what_is_told(tied: bool, shared: int, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("gemma3n_text", tie_word_embeddings=tied, num_kv_shared_layers=shared, **GEMMA3N)
    facts, arch = facts_of(folder), read_arch(folder)
    assert facts.stages is not None
    assert latest_stage(facts) == arch.latest_start
    for stages in (1, 2, 3):
        shares = stage_shares(facts, stages, "")
        assert [share.weights * facts.weights_bytes for share in shares] == bytes_of_stages(folder, stages)
        assert sum(share.whole + share.windowed for share in shares) == len(arch.kept_windows)


def test_what_nothing_reads_is_not_counted(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Published checkpoints have encoders, and matrices for keys that layers read of others."""
    text = make_checkpoint("gemma3n_text", **GEMMA3N)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    tensors["model.vision_tower.layers.0.weight"] = torch.ones(1000)
    tensors["model.language_model.layers.6.self_attn.k_proj.weight"] = torch.ones(1000)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "gemma3n", "text_config": json.loads((text / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert facts_of(tmp_path).stages == facts_of(text).stages
    assert facts_of(tmp_path).weights_bytes == facts_of(text).weights_bytes + 8000


def test_many_layers_leave_room_in_a_result(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint("gemma3n_text")
    for layers in (128, 4096):
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "num_kv_shared_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(config))
        names = [f"model.layers.{layer}.norm.weight" for layer in range(layers)]
        save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
        result = look(tmp_path)
        assert len(encode_result(result)) <= MAX_RESULT_BYTES
        assert result.facts is not None
        assert (result.facts.stages is None) == (layers == 4096)
