"""Checkpoints in numbers of a few bits, from the files to the logits; and what is said where tensors do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.loader.memory import weight_bytes
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model, build_model
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes.checkpoints import edit, reference_model
from tests.fakes.dense_attention import logits
from tests.fakes.native_kernels import experts_one_by_one, native_library
from tests.fakes.packed_checkpoints import Packed, awq_words, packed_checkpoint
from tests.fakes.paged_step import paged_step

CPU = torch.device("cpu")
Make = Callable[..., Path]
FORMATS = [
    Packed("pack-quantized", zeros=True),
    Packed("pack-quantized", ordered=True),
    Packed("pack-quantized", 8, group=None),
    Packed("awq", zeros=True),
    Packed("gptq", zeros=True, ordered=True),
    Packed("gptq", 3),
    Packed("gptq_v2", 8, zeros=True),
    Packed("int-quantized", 8, group=None, zeros=True),
]
W4A8 = Packed("pack-quantized", inputs="int")
GPTQ = Packed("gptq", zeros=True, ordered=True)
O_PROJ = "model.layers.0.self_attn.o_proj"


def load(folder: Path, use_kernels: bool = False) -> Model:
    return load_model(folder, read_arch(folder), Placement(torch.float32, CPU, use_kernels), "auto", 0)


def logits_in_pages(model: Model, length: int = 12) -> Tensor:
    """The same by what a GPU runs, on its kernels' twins."""
    with torch.inference_mode():
        tokens, step = torch.arange(3, 3 + length), paged_step(model.arch, length)
        return model.logits(model.forward(tokens, torch.arange(length), step))


@pytest.fixture
def packed(make_checkpoint: Make, tmp_path: Path) -> Callable[..., Path]:
    return lambda how, **more: packed_checkpoint(make_checkpoint("llama"), tmp_path / "packed", how, **more)


def stored(folder: Path, name: str) -> Tensor:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors[name]


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load(folder)
    said = str(error.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_logits_are_those_of_transformers_with_what_the_numbers_mean(how: Packed, packed: Callable[..., Path]) -> None:
    folder = packed(how)
    with torch.inference_mode():
        expected = reference_model(Path(f"{folder}-plain"))(torch.arange(3, 15)[None]).logits[0]
    torch.testing.assert_close(logits(load(folder)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("packing", "how"),
    [
        ("auto_round:auto_gptq", Packed("gptq", 2, zeros=True)),
        ("auto_round", Packed("gptq_v2", zeros=True)),
        ("auto_round:auto_awq", Packed("awq", zeros=True)),
    ],
)
def test_autoround_s_packings_are_those_of_others(packing: str, how: Packed, packed: Callable[..., Path]) -> None:
    rules = {
        "extra_config": {"model.layers.0.self_attn.o_proj": {"bits": 16}},
        "block_name_to_quantize": "model.layers",
    }
    said = {"quant_method": "auto-round", "packing_format": packing, "sym": False, "data_type": "int", **rules}
    folder = packed(how, config=said, kept="layers.0.self_attn.o_proj")
    torch.testing.assert_close(logits(load(folder)), logits(load(Path(f"{folder}-plain"))), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_compiled_kernels_give_the_logits_of_expanded_weights(how: Packed, packed: Callable[..., Path]) -> None:
    """But for the rounding of inputs to 8 bits."""
    folder, placement = packed(how), Placement(torch.float32, CPU, False, native=native_library())
    found = logits(load_model(folder, read_arch(folder), placement, "auto", 0))
    expected = logits(load(folder))
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("how", [Packed("awq", zeros=True), Packed("gptq", 3), W4A8, FORMATS[-1]], ids=str)
def test_layers_of_experts_are_what_their_products_are(how: Packed, make_checkpoint: Make, tmp_path: Path) -> None:
    """But for what is rounded the other way."""
    folder = packed_checkpoint(make_checkpoint("qwen3_moe", moe_intermediate_size=64), tmp_path / "packed", how)
    arch, placement = read_arch(folder), Placement(torch.float32, CPU, False, native=native_library())
    found = logits(load_model(folder, arch, placement, "auto", 0))
    with experts_one_by_one():
        expected = logits(load_model(folder, arch, placement, "auto", 0))
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("how", [W4A8, Packed("pack-quantized", group=64, zeros=True, inputs="float")], ids=str)
def test_experts_by_the_kernels_of_a_gpu_round_their_inputs(how: Packed, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = packed_checkpoint(make_checkpoint("qwen3_moe", moe_intermediate_size=64), tmp_path / "packed", how)
    found, expected = logits_in_pages(load(folder, use_kernels=True)), logits(load(folder))
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_experts_in_act_order_are_products_one_by_one(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", moe_intermediate_size=64)
    folder = packed_checkpoint(source, tmp_path / "packed", FORMATS[1])
    arch, placement = read_arch(folder), Placement(torch.float32, CPU, False, native=native_library())
    found = logits(load_model(folder, arch, placement, "auto", 0))
    with experts_one_by_one():
        assert torch.equal(found, logits(load_model(folder, arch, placement, "auto", 0)))


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_layers_that_are_named_stay_as_they_are(how: Packed, packed: Callable[..., Path]) -> None:
    names = (
        {"ignore": ["lm_head", "re:.*self_attn.*"]}
        if how.format.endswith("-quantized")
        else {"modules_to_not_convert": ["self_attn"]}
    )
    folder = packed(how, config=names, kept="self_attn")
    torch.testing.assert_close(logits(load(folder)), logits(load(Path(f"{folder}-plain"))), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", FORMATS, ids=str)
@pytest.mark.parametrize("use_kernels", [False, True])
def test_the_estimate_is_what_is_kept(how: Packed, use_kernels: bool, packed: Callable[..., Path]) -> None:
    """Of one layer's matrices and all that belongs to them, but for the order of inputs where these are in order."""
    folder = packed(how)
    arch = read_arch(folder)
    placement = Placement(torch.float32, CPU, use_kernels, arch.quantization)
    model = build_model(arch, placement)
    estimated = weight_bytes(arch, model.weights(), placement)
    plain = build_model(arch, Placement(torch.float32, CPU, use_kernels))
    expanded = weight_bytes(arch, plain.weights(), placement)
    if not use_kernels:
        assert estimated == expanded
        return
    tensors = load_file(folder / "model.safetensors")
    numbers = sum(
        part.numel() * 32 // how.bits for name, part in tensors.items() if name.endswith(("packed", "qweight"))
    )
    numbers += sum(part.numel() for name, part in tensors.items() if name.endswith("proj.weight"))
    scales = sum(part.numel() for name, part in tensors.items() if name.endswith(("scales", "weight_scale")))
    order = sum(part.numel() for name, part in tensors.items() if name.endswith("g_idx")) if how.ordered else 0
    bits = 8 if how.bits == 8 else 4
    kept = numbers * bits // 8 + scales * (5 if how.zeros else 4) + order * 4
    assert estimated == expanded - 4 * numbers + kept


def test_dummy_weights(packed: Callable[..., Path], tmp_path: Path) -> None:
    for number, how in enumerate(FORMATS):
        folder = tmp_path / f"dummy-{number}"
        folder.mkdir()
        made = packed(how)
        shutil.copy(made / "config.json", folder)
        shutil.rmtree(made)
        shutil.rmtree(f"{made}-plain")
        out = logits(load_model(folder, read_arch(folder), Placement(torch.float32, CPU, False), "dummy", 1))
        assert out.isfinite().all()
        assert out.std() > 1e-3


def test_a_missing_tensor(packed: Callable[..., Path]) -> None:
    folder = packed(GPTQ)
    edit(folder, {f"{O_PROJ}.g_idx": None})
    assert f"the weights lack {O_PROJ}.g_idx: download the checkpoint again" in refusal(folder)


def test_groups_that_are_not_there(packed: Callable[..., Path]) -> None:
    folder = packed(GPTQ)
    groups = stored(folder, f"{O_PROJ}.g_idx")
    edit(folder, {f"{O_PROJ}.g_idx": groups + 7})
    said = refusal(folder)
    assert f"model.safetensors: {O_PROJ}.g_idx puts inputs into groups 7 to" in said
    assert "give group_size" in said


def test_groups_of_different_sizes(packed: Callable[..., Path]) -> None:
    folder = packed(GPTQ)
    groups = stored(folder, f"{O_PROJ}.g_idx")
    groups[groups.argmax()] = 0
    edit(folder, {f"{O_PROJ}.g_idx": groups})
    assert f"{O_PROJ}.g_idx makes groups of 31 to 33 inputs, and group_size is 32" in refusal(folder)


def test_groups_in_an_order_that_the_config_denies(packed: Callable[..., Path]) -> None:
    folder = packed(Packed("gptq"))
    name = "model.layers.1.self_attn.k_proj.g_idx"
    groups, expected = stored(folder, name), logits(load(folder))
    edit(folder, {name: torch.zeros_like(groups)})
    assert torch.equal(logits(load(folder)), expected)
    edit(folder, {name: None})
    assert torch.equal(logits(load(folder)), expected)
    edit(folder, {name: groups.flip(0)})
    said = refusal(folder)
    assert f"model.safetensors: {name} has inputs in groups otherwise than as neighbours" in said
    assert "give desc_act true" in said


def test_a_zero_point_out_of_range(packed: Callable[..., Path]) -> None:
    folder = packed(GPTQ)
    zeros = stored(folder, f"{O_PROJ}.qzeros")
    zeros[0, 0] = -1
    edit(folder, {f"{O_PROJ}.qzeros": zeros})
    assert f"{O_PROJ}.qzeros holds a zero point of 16, and 15 is the largest" in refusal(folder)


def test_zero_points_of_another_version(packed: Callable[..., Path]) -> None:
    folder = packed(Packed("gptq_v2"), config={"checkpoint_format": "gptq"})
    assert "qzeros holds zero points other than 8, which config.json's sym means" in refusal(folder)


def test_a_scale_that_is_no_number(packed: Callable[..., Path]) -> None:
    folder = packed(Packed("awq", zeros=True))
    scales = stored(folder, f"{O_PROJ}.scales")
    scales[0, 1] = float("nan")
    edit(folder, {f"{O_PROJ}.scales": scales})
    assert f"{O_PROJ}.scales holds a number that is not finite: download the checkpoint again" in refusal(folder)


def test_a_misshapen_zero_point(packed: Callable[..., Path]) -> None:
    folder = packed(Packed("awq", zeros=True))
    edit(folder, {f"{O_PROJ}.qzeros": awq_words(torch.zeros(7, 64, dtype=torch.int32))})
    assert f"{O_PROJ}.qzeros is [7, 8], config.json makes it [2, 8]" in refusal(folder)


@pytest.mark.parametrize(("claimed", "lacking"), [("awq", "qweight is"), ("pack-quantized", "the weights lack")])
def test_tensors_of_another_form_than_the_configuration_says(
    claimed: str, lacking: str, packed: Callable[..., Path]
) -> None:
    folder = packed(Packed("gptq"))
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = Packed(claimed, zeros=claimed == "awq").config()
    (folder / "config.json").write_text(json.dumps(settings))
    assert lacking in refusal(folder)


def test_a_configuration_that_says_nothing_of_it(packed: Callable[..., Path]) -> None:
    folder = packed(GPTQ)
    settings = json.loads((folder / "config.json").read_text())
    section = settings.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(settings))
    assert "model.layers.0.mlp.down_proj.weight, " in refusal(folder)
    assert "quantized, where the model has floats: repair quantization_config" in refusal(folder)
    plain = Path(f"{folder}-plain")
    (plain / "config.json").write_text(json.dumps(settings | {"quantization_config": section}))
    assert "in a float type, and config.json a quantized one" in refusal(plain)


def test_groups_that_do_not_divide(packed: Callable[..., Path]) -> None:
    folder = packed(Packed("gptq"), config={"group_size": 48})
    assert "inputs, which groups of 48 do not divide: give group_size" in refusal(folder)


def test_weights_of_another_type(packed: Callable[..., Path]) -> None:
    folder = packed(Packed("gptq"))
    edit(folder, {f"{O_PROJ}.qweight": stored(folder, f"{O_PROJ}.qweight").float()})
    assert (
        f"{O_PROJ}.qweight is of type F32; config.json says that it is quantized: give a checkpoint in I32"
        in refusal(folder)
    )


def test_biases_of_zeros_that_a_model_does_not_have_are_passed_over(packed: Callable[..., Path]) -> None:
    folder = packed(GPTQ)
    expected = logits(load(folder))
    edit(folder, {f"{O_PROJ}.bias": torch.zeros(64, dtype=torch.float16)})
    assert torch.equal(logits(load(folder)), expected)
    place = Placement(torch.float32, CPU, use_kernels=False, layers=range(1, read_arch(folder).num_layers))
    load_model(folder, read_arch(folder), place, "auto", 0)  # another stage has the bias
    edit(folder, {f"{O_PROJ}.bias": torch.ones(64, dtype=torch.float16)})
    said = refusal(folder)
    assert f"model.safetensors: {O_PROJ}.bias" in said
    assert "is a bias, and the model has none there: config.json is of another model" in said


def test_numbers_of_more_bits_than_the_configuration_says(packed: Callable[..., Path]) -> None:
    folder = packed(Packed("int-quantized"))
    weight = stored(folder, f"{O_PROJ}.weight")
    weight[3, 5] = 8
    edit(folder, {f"{O_PROJ}.weight": weight})
    assert f"{O_PROJ}.weight holds numbers from -8 to 8, which are not of 4 bits: give num_bits" in refusal(folder)
