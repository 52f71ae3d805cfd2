"""A folder with a file for each rank: what ranks get from it, and what is no such folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.llm import LLM
from pagefleet_engine.loader.checkpoint import TensorFile
from pagefleet_engine.loader.load import foreign_names
from pagefleet_engine.loader.safetensors import Reading, fill_from_safetensors
from pagefleet_engine.loader.save_shards import Collector, save_shards
from pagefleet_engine.loader.sharded import OwnShard, Shards, check_whole, kept_alone, shard_files
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model
from pagefleet_engine.ranks.group import Alone
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_protocol.sampling_params import SamplingParams
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.ranks.test_tensor_ranks import Make


class Seat(Alone):
    """A rank of tensor ranks that never meet."""

    def __init__(self, size: int, index: int) -> None:
        self.size = size
        self.index = index


def config_for(parallel: Parallelism) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model="/m"), parallel=parallel)


def kept(folder: Path, rank: int, parallel: Parallelism, out: Path | None) -> dict[str, Tensor]:
    """What a rank is given, of the checkpoint or of a folder of shards."""
    arch, part = read_arch(folder), parallel.part(rank)
    layers = arch.stage_layers(parallel)[part.stage]
    seat = Seat(part.tensor_size, part.tensor)
    own = layers if parallel.pipeline_parallel_size > 1 else None
    place = Placement(torch.float32, torch.device("cpu"), use_kernels=False, tensor=seat, layers=own)
    destinations = weight_map(build_model(arch, place).weights())
    found: dict[str, Tensor] = {}
    collector = Collector(destinations, found.update, 1)
    names = foreign_names(arch, place)
    files = None
    if out is not None:
        destinations = kept_alone(destinations)
        files = [TensorFile(path, None) for path in shard_files(out, OwnShard.of(parallel, part))]
    fill_from_safetensors(
        folder, destinations, arch.tie_word_embeddings, foreign=names, reading=Reading(files, collector)
    )
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "parallel",
    [
        Parallelism(),
        Parallelism(tensor_parallel_size=2),
        Parallelism(pipeline_parallel_size=2, pipeline_layers="1,2"),
        Parallelism(tensor_parallel_size=2, pipeline_parallel_size=2),
    ],
    ids=["one", "tensor", "pipeline", "both"],
)
def test_each_rank_gets_what_it_got_of_the_checkpoint(
    family: str, parallel: Parallelism, make_checkpoint: Make, tmp_path: Path
) -> None:
    folder, out = make_checkpoint(family), tmp_path / "out"
    save_shards(config_for(parallel), read_arch(folder), folder, out, file_bytes=20_000)
    for rank in range(parallel.world_size):
        whole, own = kept(folder, rank, parallel, None), kept(folder, rank, parallel, out)
        assert whole.keys() == own.keys()
        assert all(torch.equal(whole[name], own[name]) for name in whole)
        assert len(list(out.glob(f"model-rank-{rank}-part-*"))) > 1
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_an_engine_answers_from_it_as_from_the_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64, "num_threads": 1}
    answers = []
    with LLM("builtin://tiny", **settings) as llm:
        llm.save_sharded_state(tmp_path / "out")
        with pytest.raises(ConfigError, match="out exists and is no empty folder: give a new folder"):
            llm.save_sharded_state(tmp_path / "out")
    for model, load_format in (("builtin://tiny", "auto"), (str(tmp_path / "out"), "sharded_state")):
        with LLM(model, load_format=load_format, **settings) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=6)
            (output,) = llm.generate("What are you?", sampling, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
    assert answers[0] == answers[1]
    with pytest.raises(ModelLoadError, match=r"has no sharded_state\.json: it was not written by LLM"):
        LLM("builtin://tiny", load_format="sharded_state", **settings)


@pytest.mark.fleet
def test_ranks_in_processes_answer_from_their_own_files(tmp_path: Path) -> None:
    two: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64, "num_threads": 1, "tensor_parallel_size": 2}
    folder = builtin_model_path("tiny")
    save_shards(config_for(Parallelism(tensor_parallel_size=2)), read_arch(folder), folder, tmp_path / "out")
    answers = []
    for model, load_format in (("builtin://tiny", "auto"), (str(tmp_path / "out"), "sharded_state")):
        with LLM(model, load_format=load_format, dtype="float32", **two) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=6)
            (output,) = llm.generate("What are you?", sampling, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
    assert answers[0] == answers[1]


def test_a_folder_is_for_the_ranks_that_it_was_saved_for(make_checkpoint: Make, tmp_path: Path) -> None:
    folder, out, two = make_checkpoint("llama"), tmp_path / "out", Parallelism(tensor_parallel_size=2)
    save_shards(config_for(two), read_arch(folder), folder, out)
    other = OwnShard(Shards(4, 1, None), 0)
    with pytest.raises(ModelLoadError, match="was saved for tensor_parallel_size 2 and pipeline_parallel_size 1: give"):
        shard_files(out, other)
    with pytest.raises(ModelLoadError, match="for tensor_parallel_size 2: give this, and --load-format sharded_state"):
        check_whole(out)
    with pytest.raises(ModelLoadError, match="for tensor_parallel_size 2: give the model that it was saved from"):
        save_shards(config_for(two), read_arch(folder), out, tmp_path / "again")
    (out / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no model-rank-1-part-0\.safetensors: copy the folder again"):
        shard_files(out, OwnShard.of(two, two.part(1)))
    experts = replace(two, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="whole experts on ranks: this is not saved in shards"):
        save_shards(config_for(experts), read_arch(folder), folder, tmp_path / "more")


def test_a_folder_is_saved_whole_or_not_at_all(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, two = make_checkpoint("llama"), tmp_path / "out", Parallelism(tensor_parallel_size=2)
    saved: list[Path] = []

    def fills_up(tensors: dict[str, Tensor], path: Path, about: dict[str, str]) -> None:
        if saved:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, about)
        saved.append(path)

    with monkeypatch.context() as patch:
        patch.setattr("pagefleet_engine.loader.save_shards.save_file", fills_up)
        with pytest.raises(ConfigError, match=r"out cannot be written \(I/O error: No space left .*nothing is left of"):
            save_shards(config_for(two), read_arch(folder), folder, out)
    assert [saved[0].name, *tmp_path.iterdir()] == ["model-rank-0-part-0.safetensors"]
    out.mkdir()
    save_shards(config_for(two), read_arch(folder), folder, out)
    assert [*tmp_path.iterdir()] == [out]
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}, "others serve what one has saved"
