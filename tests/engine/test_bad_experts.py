"""Mixtures of experts that cannot be served, from the folder to the one line that is said; and requests whose router
gives no numbers, which end alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from pagefleet_engine import LLM, LLMEngine, SamplingParams
from pagefleet_engine.errors import EngineError, RequestFailed
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.changed_checkpoint import Change, changed, nothing
from tests.fakes.coded_checkpoints import Coded, coded_checkpoint
from tests.fakes.packed_checkpoints import Packed
from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint

Make = Callable[..., Path]
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64, "num_threads": 1}
EXPERT = "model.layers.1.mlp.experts.3"


@pytest.fixture
def broken(make_checkpoint: Make, tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint of a family with other tensors and other fields of the configuration."""

    def make(family: str, change: Change = nothing, **config: Any) -> Path:
        return changed(make_checkpoint(family), tmp_path / family, change, **config)

    return make


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(EngineError) as error:
        LLM(str(folder), skip_tokenizer_init=True, **SETTINGS, **settings)
    message = str(error.value)
    assert "\n" not in message
    return message


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def add(name: str, of: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[of].clone()})


def store(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


AGAIN = "download the checkpoint again"
OTHER_MODEL = "the config.json beside it is of another model"
BAD_FOLDERS: dict[str, tuple[str, Change, dict[str, Any], tuple[str, ...]]] = {
    "an expert's matrix is missing": (
        "qwen3_moe",
        drop(f"{EXPERT}.up_proj.weight"),
        {},
        (f"the weights lack {EXPERT}.up_proj.weight", AGAIN),
    ),
    "a whole expert is missing": (
        "qwen3_moe",
        drop(*(f"{EXPERT}.{part}_proj.weight" for part in ("gate", "up", "down"))),
        {},
        ("the weights lack", f"{EXPERT}.down_proj.weight", AGAIN),
    ),
    "a router is missing": ("mixtral", drop("model.layers.0.block_sparse_moe.gate.weight"), {}, ("lack", AGAIN)),
    "an expert is there once more under another number": (
        "qwen3_moe",
        add("model.layers.1.mlp.experts.8.up_proj.weight", f"{EXPERT}.up_proj.weight"),
        {},
        ("no place in the model for model.layers.1.mlp.experts.8.up_proj.weight", OTHER_MODEL),
    ),
    "an expert is there once more beside those in one tensor": (
        "granitemoe",
        add(
            "model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.block_sparse_moe.input_linear.weight"
        ),
        {},
        ("no place in the model for model.layers.0.block_sparse_moe.experts.0.w1.weight", OTHER_MODEL),
    ),
    "fewer experts are configured": (
        "mixtral",
        nothing,
        {"num_local_experts": 3},
        ("no place in the model for model.layers.0.block_sparse_moe.experts.3.w1.weight", OTHER_MODEL),
    ),
    "more experts are configured": (
        "mixtral",
        nothing,
        {"num_local_experts": 5},
        ("the weights lack model.layers.0.block_sparse_moe.experts.4.w1.weight", AGAIN),
    ),
    "fewer experts are configured than one tensor has": (
        "granitemoe",
        nothing,
        {"num_local_experts": 4},
        ("input_linear.weight is [8, 96, 64], config.json makes it [4, 96, 64]: the two files are not of the same",),
    ),
    "tokens go to more experts than there are": (
        "olmoe",
        nothing,
        {"num_experts_per_tok": 9},
        ("num_experts_per_tok is 9, of 8 experts: repair the file",),
    ),
    "no expert is configured": ("mixtral", nothing, {"num_local_experts": 0}, ("num_local_experts is 0",)),
    "an expert is stored in eight bits": (
        "qwen3_moe",
        store(f"{EXPERT}.up_proj.weight", torch.float8_e4m3fn),
        {},
        (f"{EXPERT}.up_proj.weight is of type F8_E4M3; give a checkpoint in F64, F32, F16, BF16",),
    ),
    "what chooses experts is no number": (
        "glm4_moe",
        lambda tensors: tensors["model.layers.1.mlp.gate.e_score_correction_bias"][2:3].fill_(torch.nan),
        {},
        ("model.layers.1.mlp.gate.e_score_correction_bias has values that are no numbers", AGAIN),
    ),
    "experts in few bits in one tensor": (
        "gpt_oss",
        nothing,
        {"quantization_config": Packed("pack-quantized").config()},
        ("int4 weights per group of 32", "in one tensor are not run here: give a checkpoint that has each expert in"),
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_that_cannot_be_is_refused_in_one_line(case: str, broken: Callable[..., Path]) -> None:
    family, change, config, words = BAD_FOLDERS[case]
    said = refusal(broken(family, change, **config))
    assert all(word in said for word in words), said


def test_what_one_part_has_quantized_and_the_other_in_floats(make_checkpoint: Make, tmp_path: Path) -> None:
    """As by transformers' versions before and since experts are one tensor there."""
    source = make_checkpoint("qwen3_moe", moe_intermediate_size=64, intermediate_size=128)
    folder, how = coded_checkpoint(source, tmp_path / "coded", Coded("nf4")), Coded("nf4")
    router, tensors = "model.layers.1.mlp.gate", load_file(folder / "model.safetensors")
    parts, _ = how.store(tensors[f"{router}.weight"])
    quantized = tensors | {f"{router}.{kind}": part for kind, part in parts.items()}
    save_file(quantized, folder / "model.safetensors")
    words = f"the weights have {router}.weight quantized, where the model has floats: repair quantization_config"
    assert words in refusal(folder)
    plain = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]
    save_file(tensors | {name: plain[name] for name in plain if ".experts." in name}, folder / "model.safetensors")
    words = "experts.0.down_proj.weight, model.layers.0.mlp.experts.0.gate_proj.weight"
    said = refusal(folder)
    assert words in said
    assert "in a float type, and config.json a quantized one: name such layers there" in said
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = ["experts"]
    (folder / "config.json").write_text(json.dumps(config))
    LLM(str(folder), skip_tokenizer_init=True, **SETTINGS).shutdown()


def test_an_expert_in_two_files(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    copytree(make_checkpoint("qwen3_moe"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = f"{EXPERT}.up_proj.weight"
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    save_file({name: tensors[name]}, folder / "second.safetensors")
    assert f"second.safetensors and {folder}/first.safetensors both hold {name}: keep one set" in refusal(folder)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (
            f"{EXPERT}.up_proj",
            f"projections that are computed as one are quantized in different ways ({EXPERT}.gate_proj: fp8 weights "
            f"per channel, inputs per token, {EXPERT}.up_proj: not quantized): quantize them alike",
        ),
        (
            EXPERT,
            "model.layers.1.mlp: experts are quantized in different ways (experts.0.gate_up_proj: fp8 weights per "
            "channel, inputs per token, experts.3.gate_up_proj: not quantized): quantize them alike",
        ),
    ],
)
def test_experts_that_are_quantized_in_different_ways(
    left_out: str, words: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    recipe = Recipe("float", "channel")
    config = {"ignore": ["lm_head", left_out]}
    folder = quantize_checkpoint(make_checkpoint("qwen3_moe"), tmp_path / "quantized", recipe, config=config)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("mixtral", {"enable_expert_parallel": True}, "divides experts among ranks, and there is one: raise tensor_"),
        ("llama", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "the model has none: leave it out"),
        ("mixtral", {"tensor_parallel_size": 8, "enable_expert_parallel": True}, "4 experts cannot be divided among 8"),
        (
            "mixtral",
            {
                "tensor_parallel_size": 2,
                "enable_expert_parallel": True,
                "enable_eplb": True,
                "num_redundant_experts": 5,
            },
            "num_redundant_experts is 5, and 4 experts on each of 2 ranks are 4 more: give that at most",
        ),
        pytest.param(
            "mixtral",
            {"tensor_parallel_size": 3},
            "4 heads of attention over 2 of keys and values cannot be divided among 3",
            marks=pytest.mark.fleet,
        ),
    ],
    ids=str,
)
def test_ranks_that_do_not_fit(family: str, settings: dict[str, Any], words: str, make_checkpoint: Make) -> None:
    assert words in refusal(make_checkpoint(family), **settings)


def overflow(tensors: dict[str, Tensor]) -> None:
    """The first layer's router has no numbers for the token BAD alone, whose first number no other token has."""
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "o_proj.weight")):
            (tensor[:, 0] if "embed" in name else tensor[0])[:] = 0
    tensors["model.embed_tokens.weight"][BAD, 0] = 100
    router = next(name for name in sorted(tensors) if name.endswith((".gate.weight", ".router.weight", "layer.weight")))
    tensors[router][:, 0] = torch.finfo(torch.float32).max


def no_numbers(tensors: dict[str, Tensor]) -> None:
    """All of a token's are none, and so is what any router makes of it."""
    tensors["model.embed_tokens.weight"][BAD] = torch.nan


BAD = 300
GOOD = [[5, 9, 30, 31, 7], [200, 3], [44] * 20]


def run(folder: Path, prompts: Iterable[list[int]], **settings: Any) -> tuple[dict[str, list[int]], list[str]]:
    """Tokens of each prompt that gets all of them, by its text; and what ended the others."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = LLMEngine(str(folder), skip_tokenizer_init=True, **SETTINGS, **settings)
    for prompt in prompts:
        engine.add_request(str(prompt), {"prompt_token_ids": prompt}, sampling)
    found, errors = dict[str, list[int]](), list[str]()
    while engine.has_unfinished_requests():
        try:
            found |= {out.request_id: [*out.outputs[0].token_ids] for out in engine.step() if out.finished}
        except RequestFailed as error:
            errors.append(str(error))
    engine.shutdown()
    return found, errors


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_moe", overflow),
        ("granitemoe", overflow),
        ("phimoe", no_numbers),
        ("deepseek_v3", no_numbers),
        ("llama4_text", no_numbers),
    ],
)
@pytest.mark.usefixtures("same_threads_after")
def test_a_router_that_gives_no_numbers_ends_its_own_request(
    family: str, change: Change, native: bool, broken: Callable[..., Path]
) -> None:
    folder = broken(family, change)
    alone, errors = run(folder, GOOD, native_kernels=native)
    assert not errors
    assert len(alone) == len(GOOD)
    first, *others = GOOD
    beside, errors = run(folder, [[7, BAD, 8], first, [BAD], *others], native_kernels=native)
    assert errors == ["The model's output for this request is not a number."] * 2
    assert beside == alone
