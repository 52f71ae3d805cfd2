"""Loading whole checkpoints: sharded and not, cast on the way, dummy; and every damage as one line with a remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader import load as load_module
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.loader.safetensors import fill_from_safetensors
from pagefleet_engine.loader.weight_map import Destination, weight_map
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model, build_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.checkpoints import FAMILIES
from tests.fakes.dense_attention import logits

CPU = torch.device("cpu")
Make = Callable[..., Path]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, read_arch(folder), Placement(dtype, CPU, False), "auto", 0)


class Recorder:
    """Keeps what is loaded, before any layer repacks it."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        arch = read_arch(folder)
        self.whole: dict[str, Tensor] = {}
        model = build_model(arch, Placement(dtype, CPU, use_kernels=False))
        slots = dict(model.weights())
        for name, slot in slots.items():
            slot._install = partial(self._keep, name)
        fill_from_safetensors(folder, weight_map(slots.items()), arch.tie_word_embeddings)

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.whole[name] = tensor.clone()  # its memory may be used again


@pytest.fixture
def copy(make_checkpoint: Make, tmp_path: Path) -> Path:
    """A llama checkpoint that the test may damage."""
    return Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "model"))


@pytest.fixture
def sharded(make_checkpoint: Make, tmp_path: Path) -> Path:
    """The same in several shards."""
    return Path(shutil.copytree(make_checkpoint("llama", shard_size="100KB"), tmp_path / "sharded"))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(dict(change(tensors)), path, metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_and_a_whole_checkpoint_give_equal_weights(family: str, make_checkpoint: Make) -> None:
    whole = Recorder(make_checkpoint(family), torch.float32).whole
    folder = make_checkpoint(family, shard_size="50KB")
    assert len(list(folder.glob("*-of-*.safetensors"))) > 3
    shards = Recorder(folder, torch.float32).whole
    assert whole.keys() == shards.keys()
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


def test_merged_weights_hold_their_parts_in_order(make_checkpoint: Make) -> None:
    folder = make_checkpoint("qwen2")
    source, whole = load_file(folder / "model.safetensors"), Recorder(folder, torch.float32).whole
    layer = "model.layers.1"
    for kind in ("weight", "bias"):
        expected = torch.cat([source[f"{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(whole[f"{layer}.self_attn.qkv_proj.{kind}"], expected)
    expected = torch.cat([source[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(whole[f"{layer}.mlp.gate_up_proj.weight"], expected)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_types_are_cast_on_the_way(stored: str, wanted: torch.dtype, make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama", dtype=stored)
    source, whole = load_file(folder / "model.safetensors"), Recorder(folder, wanted).whole
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(whole[name], source[name].to(wanted))
    assert logits(load(folder, wanted)).dtype == wanted


def test_bfloat16_stays_near_float32(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama", dtype="bfloat16")
    precise, rough = logits(load(folder)), logits(load(folder, torch.bfloat16)).float()
    assert torch.nn.functional.cosine_similarity(precise, rough).min() > 0.999


def test_dummy_weights_follow_their_seed(make_checkpoint: Make, tmp_path: Path) -> None:
    shutil.copy(make_checkpoint("qwen3") / "config.json", tmp_path)
    arch = read_arch(tmp_path)
    first, again, other = (
        logits(load_model(tmp_path, arch, Placement(torch.float32, CPU, False), "dummy", seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()


def test_tensors_that_no_model_needs_are_passed_over(copy: Path) -> None:
    before = logits(load(copy))
    edit(copy, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(logits(load(copy)), before)


def test_a_tied_checkpoint_may_carry_its_head(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_checkpoint("llama", tie_word_embeddings=True), tmp_path / "tied"))
    before = logits(load(folder))
    edit(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert torch.equal(logits(load(folder)), before)


def test_a_missing_tensor(copy: Path) -> None:
    edit(copy, lambda tensors: {name: t for name, t in tensors.items() if "layers.2.mlp" not in name})
    said = refusal(copy)
    assert said.startswith(f"{copy}/model.safetensors: the weights lack model.layers.2.mlp.down_proj.weight, ")
    assert said.endswith("download the checkpoint again")


def test_a_missing_part_of_a_merged_weight(copy: Path) -> None:
    edit(
        copy,
        lambda tensors: {name: t for name, t in tensors.items() if name != "model.layers.0.self_attn.k_proj.weight"},
    )
    assert "lack model.layers.0.self_attn.k_proj.weight:" in refusal(copy)


def test_weights_that_end_in_a_classification_say_what_they_are(copy: Path) -> None:
    score = {"score.weight": torch.ones(2, 64)}
    edit(copy, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"} | score)
    assert refusal(copy) == (
        f"{copy}: the weights have score.weight and no lm_head.weight: this model classifies or scores text and "
        "generates none; give one that was saved as ...ForCausalLM"
    )


def test_extra_tensors(copy: Path) -> None:
    extra = {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(160, 64) for layer in range(3, 9)}
    edit(copy, lambda tensors: tensors | extra)
    said = refusal(copy)
    assert "no place in the model for model.layers.3.mlp.up_proj.weight" in said
    assert "and 3 more" in said


def test_a_name_forges_no_second_line(copy: Path) -> None:
    edit(copy, lambda tensors: tensors | {"z\nall is well\x1b[m" + "z" * 9999: torch.ones(1)})
    said = refusal(copy)
    assert r"no place in the model for z\nall is well\x1b[mzzz" in said
    assert len(said) < 500


def test_a_misshapen_tensor(copy: Path) -> None:
    edit(copy, lambda tensors: tensors | {"model.norm.weight": torch.ones(65)})
    assert "model.safetensors: model.norm.weight is [65], config.json makes it [64]" in refusal(copy)


def test_an_unsupported_type(copy: Path) -> None:
    edit(copy, lambda tensors: tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    assert "model.norm.weight is of type I8; give a checkpoint in F64, F32, F16, BF16" in refusal(copy)


@pytest.mark.parametrize("keep", [0, 4, 8, 200, 5000, -1])
def test_a_truncated_file(copy: Path, keep: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    said = refusal(copy)
    assert said.startswith(str(path))
    assert "truncated or not a safetensors file" in said


@pytest.mark.parametrize("garbage", [b"\x80\x04\x95" * 1000, b"\xff" * 1000, b"\0" * 1000, b"<html></html>"])
def test_a_file_of_something_else(copy: Path, garbage: bytes) -> None:
    (copy / "model.safetensors").write_bytes(garbage)
    assert "not a safetensors file" in refusal(copy)


def test_a_header_of_empty_tensors(copy: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"model.layers.{at}.weight": empty for at in range(15_000)}).encode()
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "not a safetensors file" in refusal(copy)


def test_a_missing_shard(sharded: Path) -> None:
    gone = sorted(sharded.glob("*-of-*.safetensors"))[1]
    gone.unlink()
    assert f"lacks {gone.name}, named in model.safetensors.index.json" in refusal(sharded)


def test_a_shard_without_its_tensors(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*-of-*.safetensors"))[:2]
    shutil.copy(first, second)
    assert refusal(sharded).startswith(f"{second} lacks ")


def test_shards_without_their_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert "index.json is missing beside sharded weights" in refusal(sharded)


@pytest.mark.parametrize(
    "index", ["", "{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}']
)
def test_an_unreadable_index(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert refusal(sharded).startswith(f"{sharded / 'model.safetensors.index.json'} ")


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_cannot_lead_out_of_the_folder(sharded: Path, place: str) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = place
    path.write_text(json.dumps(index))
    assert f"names {place}: shards must lie beside it" in refusal(sharded)


@pytest.mark.parametrize("place", ["", "..", "x" * 5000])
def test_an_index_names_what_no_file_can_be(sharded: Path, place: str) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": place}}))
    assert f"{sharded} lacks {place[:100]}" in refusal(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(copy: Path, name: str) -> None:
    (copy / "model.safetensors").rename(copy / name)
    said = refusal(copy)
    assert name in said
    assert "convert them to safetensors" in said


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "has no *.safetensors file: download the weights" in refusal(copy)


def test_one_file_under_another_name_is_read(copy: Path) -> None:
    before = logits(load(copy))
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    assert torch.equal(logits(load(copy)), before)


def test_two_sets_of_weights_are_ambiguous(copy: Path) -> None:
    shutil.copy(copy / "model.safetensors", copy / "other.safetensors")
    (copy / "model.safetensors").rename(copy / "one.safetensors")
    assert "both hold" in refusal(copy)


def test_a_model_too_large_for_memory_is_refused_before_it_is_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "free_bytes", lambda *_: 10_000)
    (copy / "model.safetensors").unlink()
    said = refusal(copy)
    assert "the weights take 0.00 GiB in float32, 0.00 GiB are free on cpu" in said
    assert "--dtype bfloat16" in said


def test_destinations_cover_a_checkpoint_exactly(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama", attention_bias=True, mlp_bias=True)
    model = build_model(read_arch(folder), Placement(torch.float32, CPU, use_kernels=False))
    destinations: dict[str, Destination] = weight_map(model.weights())
    source = load_file(folder / "model.safetensors")
    assert {name: place.shape for name, place in destinations.items()} == {
        name: tuple(tensor.shape) for name, tensor in source.items()
    }
