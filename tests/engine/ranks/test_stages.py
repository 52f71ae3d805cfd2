"""A model in stages, of one rank or of several each, against one rank: the same tokens, and logits as near as float32
adds up."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import on_load
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.loader.memory import weight_bytes
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.ranks.group import Alone, RankGroup
from pagefleet_engine.ranks.parallelism import Parallelism
from safetensors.torch import load_file, save_file

from tests.engine.ranks.test_tensor_ranks import (
    CASES,
    CPU,
    RECIPES,
    Make,
    generate,
    load,
    mostly_near,
)
from tests.fakes.quantized_checkpoints import quantize_checkpoint
from tests.fakes.ranks import on_ranks
from tests.fakes.staged_model import StagedModel, load_stages

pytestmark = pytest.mark.usefixtures("one_thread")

# The last four layers are together: two keep what the others read.
GEMMA3N = {
    "num_hidden_layers": 7,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding", "full", "sliding")
    ],
    "activation_sparsity_pattern": [0.9, 0.0, 0.7, 0.0, 0.0, 0.0, 0.7],
}
STAGED = CASES | {"gemma3n_text": ("gemma3n_text", GEMMA3N)}
SPLITS = {"2": Parallelism(pipeline_parallel_size=2), "3": Parallelism(pipeline_parallel_size=3)}


def load_staged(
    folder: Path, parallel: Parallelism, ranks: RankGroup, arch: ModelArch | None = None, form: str = "auto"
) -> StagedModel:
    own_tokens = parallel.enable_sequence_parallelism
    place = Placement(torch.float32, CPU, use_kernels=False, tensor=ranks, sequence_parallel=own_tokens)
    return load_stages(folder, arch or read_arch(folder), place, parallel, form)


def compare(folder: Path, parallel: Parallelism, size: int = 1, arch: ModelArch | None = None) -> torch.Tensor:
    """How far each row's logits are from those of one rank; tokens are the same."""
    expected, tokens = generate(load(folder, Alone(), arch))

    def work(ranks: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        return generate(load_staged(folder, parallel, ranks, arch))  # type: ignore[arg-type]

    logits, found = work(Alone()) if size == 1 else on_ranks(size, work)[0]
    assert torch.equal(found, tokens)
    return (logits - expected).abs().amax(-1)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", STAGED)
def test_every_family_in_stages(case: str, split: str, make_checkpoint: Make) -> None:
    family, config = STAGED[case]
    assert compare(make_checkpoint(family, **config), SPLITS[split]).max() < 1e-4


@pytest.mark.parametrize("case", STAGED)
def test_every_family_in_stages_of_different_lengths(case: str, make_checkpoint: Make) -> None:
    family, config = STAGED[case]
    folder = make_checkpoint(family, **config)
    split = Parallelism(pipeline_parallel_size=2, pipeline_layers=f"1,{read_arch(folder).num_layers - 1}")
    assert compare(folder, split).max() < 1e-4


@pytest.mark.parametrize("case", STAGED)
def test_every_family_in_stages_of_two_ranks(case: str, make_checkpoint: Make) -> None:
    family, config = STAGED[case]
    assert compare(make_checkpoint(family, **config), SPLITS["2"], 2).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3n_text"])
def test_stages_whose_ranks_have_tokens_of_their_own(family: str, make_checkpoint: Make) -> None:
    parallel = Parallelism(tensor_parallel_size=2, pipeline_parallel_size=3, enable_sequence_parallelism=True)
    assert compare(make_checkpoint(family, **STAGED[family][1]), parallel, 2).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("form", RECIPES)
def test_every_quantized_form_in_stages(form: str, family: str, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = quantize_checkpoint(make_checkpoint(family), tmp_path / "quantized", RECIPES[form])
    assert compare(folder, SPLITS["3"]).max() < 1e-4
    assert mostly_near(compare(folder, SPLITS["2"], 2))


def test_quantized_on_load_in_stages(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama")
    arch = replace(read_arch(folder), quantization=on_load("fp8"))
    assert compare(folder, SPLITS["2"], arch=arch).max() < 1e-4


def test_dummy_weights_are_those_of_one_rank(make_checkpoint: Make) -> None:
    folder = make_checkpoint("gemma2", tie_word_embeddings=True)
    alone = load_model(folder, read_arch(folder), Placement(torch.float32, CPU, False), "dummy", 5)
    staged = load_staged(folder, SPLITS["3"], Alone(), form="dummy")
    assert torch.equal(generate(alone)[0], generate(staged)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_layers_of_the_file(
    tied: bool, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages together read the file once, and a table that is both embedding and head twice."""
    folder, lock, plain, num_read = make_checkpoint("llama", tie_word_embeddings=tied), threading.Lock(), os.preadv, [0]

    def counting(file: int, views: Any, offset: int) -> int:
        count = plain(file, views, offset)
        with lock:
            num_read[0] += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    staged = load_staged(folder, SPLITS["3"], Alone())
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"].nbytes
    assert num_read[0] == sum(tensor.nbytes for tensor in tensors.values()) + (table if tied else 0)
    assert [stage.arch.num_layers for stage in staged.stages] == [1, 1, 1]


def test_the_memory_of_all_stages_is_that_of_the_model(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama")
    arch, place = read_arch(folder), Placement(torch.float32, CPU, False)
    whole = weight_bytes(arch, load(folder, Alone()).weights(), place)
    stages = load_staged(folder, SPLITS["3"], Alone()).stages
    places = [replace(place, layers=range(index, index + 1)) for index in range(3)]
    own = [weight_bytes(arch, stage.weights(), one) for stage, one in zip(stages, places, strict=True)]
    assert sum(own) == whole
    assert max(own) < whole / 2


def test_a_tensor_of_no_stage_is_refused_by_each(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint("llama")
    tensors = load_file(source / "model.safetensors")
    save_file(
        {**tensors, "model.layers.7.x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text())))
    for layers in (range(1), range(1, 3)):
        place = Placement(torch.float32, CPU, False, layers=layers)
        with pytest.raises(ModelLoadError, match=r"no place in the model for model\.layers\.7\.x"):
            load_model(tmp_path, read_arch(tmp_path), place, "auto", 0)
