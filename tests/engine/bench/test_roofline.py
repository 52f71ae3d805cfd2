"""The arithmetic of floors, against the figures that are published for real shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagefleet_engine.bench import offline
from pagefleet_engine.bench.offline import Subject
from pagefleet_engine.bench.report import Report
from pagefleet_engine.bench.roofline import ModelCost, Roofline, measure_roofline
from pagefleet_engine.bench.shapes import named_shapes, write_shape
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import MODEL_MODULES
from pagefleet_engine.models.parameters import count_parameters

H200 = Roofline(copy_bytes_per_s=4.8e12, matmul_flops_per_s=989e12)


def arch_of(name: str, folder: Path) -> ModelArch:
    return read_arch(write_shape(name, folder))


@pytest.mark.parametrize("name", named_shapes())
def test_every_shape_is_a_model_that_we_run(name: str, tmp_path: Path) -> None:
    arch = arch_of(name, tmp_path)
    assert arch.vocab_size == named_shapes()[name]["vocab_size"]
    assert (tmp_path / "tokenizer.json").is_file()


def test_every_kind_of_model_has_a_shape() -> None:
    """But for those of pictures too, of which the text is served, whose shape is there."""
    of_more = {kind for kind in MODEL_MODULES if f"{kind}_text" in MODEL_MODULES}
    assert {shape["model_type"] for shape in named_shapes().values()} == MODEL_MODULES.keys() - of_more


@pytest.mark.parametrize(
    ("name", "gigabytes", "kibibytes", "floor_ms"),
    [("llama-3.1-8b", 15.0, 128, 3.13), ("qwen3-8b", 15.1, 144, 3.15), ("qwen3-0.6b", 1.19, 112, 0.25)],
)
def test_costs_of_published_shapes(
    name: str, gigabytes: float, kibibytes: int, floor_ms: float, tmp_path: Path
) -> None:
    cost = ModelCost.of(arch_of(name, tmp_path))
    assert cost.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert cost.kv_bytes_per_token / 1024 == kibibytes
    assert cost.decode_seconds(H200, 1, 0) * 1e3 == pytest.approx(floor_ms, rel=0.02)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.1-8b", 8.03, 8.03),
        ("gpt2", 0.124, 0.124),
        ("falcon-7b", 6.92, 6.92),
        ("phi-2", 2.78, 2.78),
        ("gemma-7b", 8.54, 8.54),
        ("gemma-3n-e4b", 6.83, 4.49),  # "8", images and sound included, and "4" without the embedding
        ("gemma-3n-e2b", 4.46, 2.42),  # "5" and "2", likewise
        ("gemma-2b", 2.51, 2.51),
        ("mistral-7b", 7.25, 7.25),
        ("qwen2.5-7b", 7.62, 7.62),
        ("gemma-2-9b", 9.24, 9.24),
        ("phi-4", 14.7, 14.7),
        ("olmo-2-7b", 7.30, 7.30),
        ("granite-3.1-8b", 8.17, 8.17),
        ("command-r", 35.0, 35.0),
        ("command-r7b", 8.03, 8.03),
        ("command-a", 111.1, 111.1),
        ("stablelm-3b", 2.80, 2.80),
        ("opt-6.7b", 6.66, 6.66),
        ("bloom-7b1", 7.07, 7.07),
        ("mpt-7b", 6.65, 6.65),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("phi-3.5-moe", 41.9, 6.6),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen2-57b-a14b", 57.4, 14.2),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("qwen3-coder-480b-a35b", 480, 35),
        ("olmoe-1b-7b", 6.9, 1.3),
        ("granite-3.1-3b-a800m", 3.3, 0.88),
        ("granite-3.1-1b-a400m", 1.33, 0.43),
        ("glm-4.5", 355, 33.5),  # "32" without the tables
        ("glm-4.5-air", 106, 13.4),  # "12" without the tables
        ("deepseek-v2-lite", 15.7, 2.66),  # "2.4" without the embedding
        ("deepseek-v2", 236, 21),
        ("deepseek-v3", 671, 37.5),
        ("deepseek-r1", 671, 37.5),
        ("kimi-k2", 1026, 32.9),
        ("gpt-oss-20b", 20.9, 4.19),  # "3.6" without the embedding
        ("gpt-oss-120b", 116.8, 5.7),  # "5.1" without the embedding
        ("llama-4-scout", 107.8, 17.2),  # "109" with its vision
        ("llama-4-maverick", 400.7, 17.2),
    ],
)
def test_parameters_are_as_published(name: str, total: float, active: float, tmp_path: Path) -> None:
    count = count_parameters(arch_of(name, tmp_path))
    assert ("active" in count.describe()) == (count.active < count.total)
    assert (count.total / 1e9, count.active / 1e9) == pytest.approx((total, active), rel=0.03)


def test_a_latent_is_read_once_for_all_heads(tmp_path: Path) -> None:
    """70.3 kB per token, as published, and no more operations in a prompt than keys and values take."""
    arch = arch_of("deepseek-v3", tmp_path)
    cost = ModelCost.of(arch)
    assert cost.kv_bytes_per_token == 70_272
    assert arch.of_rank(0, 8).kv == arch.kv
    assert cost.attention_flops_per_pair == 2 * 61 * 128 * (192 + 128)
    assert cost.decode_flops_per_pair == 2 * 61 * 128 * (576 + 512)


def test_a_step_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    """One token eight of 128; a thousand all of them."""
    cost = ModelCost.of(arch_of("qwen3-30b-a3b", tmp_path))
    assert cost.decode_seconds(H200, 1, 0) * 4.8e12 == pytest.approx(cost.weight_bytes + cost.expert_bytes / 16)
    assert cost.decode_seconds(Roofline(4.8e12, 1e30), 1000, 0) * 4.8e12 == pytest.approx(
        cost.weight_bytes + cost.expert_bytes
    )
    assert cost.flops_per_token + cost.head_flops == pytest.approx(2 * 3.04e9, rel=0.02)


def test_experts_in_four_bits_are_read_as_such(tmp_path: Path) -> None:
    """As published: 12.8 GiB of gpt-oss-20b, tables included."""
    arch = arch_of("gpt-oss-20b", tmp_path)
    cost = ModelCost.of(arch, expert_bytes_per_element=17 / 32)
    assert (cost.weight_bytes + cost.expert_bytes) / 2**30 == pytest.approx(12.8 - 201_088 * 2880 * 2 / 2**30, rel=0.01)


def test_kernels_of_a_step_follow_each_other(tmp_path: Path) -> None:
    """Many short contexts: weights are bound by operations, attention by bytes, and neither hides the other."""
    cost = ModelCost.of(arch_of("llama-3.1-8b", tmp_path))
    products = 512 * (cost.flops_per_token + cost.head_flops) / 989e12
    attention = 512 * 500 * cost.kv_bytes_per_token / 4.8e12
    assert products > cost.weight_bytes / 4.8e12
    assert cost.decode_seconds(H200, 512, 500) == pytest.approx(products + attention)


def test_a_long_prompt_is_bound_by_its_operations(tmp_path: Path) -> None:
    cost = ModelCost.of(arch_of("llama-3.1-8b", tmp_path))
    assert cost.prefill_seconds(H200, 8192) == pytest.approx(
        8192 * (cost.flops_per_token + 4096 * cost.attention_flops_per_pair) / 989e12
    )


def test_a_job_is_its_prompts_and_its_steps(tmp_path: Path) -> None:
    cost = ModelCost.of(arch_of("llama-1m", tmp_path))
    prefill = cost.prefill_seconds(H200, 10) + cost.prefill_seconds(H200, 20)
    steps = cost.decode_seconds(H200, 2, 16.0) + cost.decode_seconds(H200, 1, 22.0)
    assert cost.batch_seconds(H200, [10, 20], [2, 3]) == pytest.approx(prefill + steps)


def test_the_machine_has_limits() -> None:
    roofline = measure_roofline(torch.device("cpu"))
    assert 1e8 < roofline.copy_bytes_per_s < 1e13
    assert 1e8 < roofline.matmul_flops_per_s < 1e15


def test_a_floor_is_that_of_the_type_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "measure_roofline", lambda device: H200)
    write_shape("llama-1m", tmp_path)
    long, short = (Subject.of(str(tmp_path), {"device": "cpu", "dtype": one}).cost for one in ("float32", "bfloat16"))
    assert long.weight_bytes == 2 * short.weight_bytes
    assert long.kv_bytes_per_token == 2 * short.kv_bytes_per_token


def test_a_report_states_the_limits_beside_the_figures() -> None:
    report = Report(name="demo", figures={"a_ms": {"p50": 1.5}, "count": 12_000}, roofline=H200)
    assert report.as_dict()["roofline"] == {"copy_bytes_per_s": 4.8e12, "matmul_flops_per_s": 989e12}
    table = report.table()
    assert "a ms p50" in table
    assert "12,000" in table
    assert "4,800 GB/s" in table
