"""The arithmetic of memory, and the words of a refusal."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.plan import gpu_fit
from pagefleet_operator.plan.gpu_fit import Fit, check_fit
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_operator.plan.roles import role_view
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import InferenceService

from tests.operator.plan.kube_world import FACTS, GIB, HF, profile, service

LARGE = msgspec.structs.replace(FACTS, weights_bytes=61 * GIB)
ENGINE_CONFIG = Path(__file__).parents[3] / "engine/pagefleet_engine/config.py"


def fit(facts: Any = LARGE, memory: str | None = "80Gi", gpus: int = 1, **spec: Any) -> Fit:
    one = profile(gpuMemory=memory) if memory else profile(gpuMemory=None)
    spec = {**HF, "profileRef": {"name": "h100"}, **spec}
    spec["resources"] = {"gpus": gpus, **spec.get("resources", {})}
    return fit_of(service(**spec), one, facts)


def fit_of(written: InferenceService, one: InferenceProfile, facts: Any) -> Fit:
    found = resolve(written, {"h100": one}, facts)
    assert isinstance(found, Resolved)
    return check_fit(written, found)


def test_a_model_that_is_too_large_is_refused_with_the_arithmetic() -> None:
    refusal = fit(engine={"maxModelLen": 131072}).refusal
    assert refusal is not None
    assert (refusal.path, refusal.reason) == ("spec.engine.maxModelLen", Reason.DOES_NOT_FIT)
    assert refusal.message == (
        "weights 61.0 GiB + KV cache of one sequence of 131072 tokens 16.0 GiB = 77.0 GiB, more than the 70.2 GiB that "
        "an engine may use of 80 GiB (profile h100). Set engine.maxModelLen to 74752 or less, or engine.quantization: "
        "fp8, or resources.gpus: 2, or use a GPU with more memory"
    )


@pytest.mark.parametrize(("gpus", "weights"), [(0, 9.0), (1, 15.0)])
def test_gguf_is_counted_as_it_is_kept(gpus: int, weights: float) -> None:
    facts = msgspec.structs.replace(
        FACTS, quantization="gguf", weights_bytes=8 * GIB, cpu_bytes=9 * GIB, gpu_bytes=15 * GIB
    )
    found = fit(facts, gpus=gpus, engine={"maxModelLen": 1024}, resources={"memory": "80Gi"}).memory
    assert found is not None
    assert found.weights == weights


def test_every_tensor_rank_has_all_latents() -> None:
    """DeepSeek-V3's 576 numbers of each token and layer: as many on each of 8 GPUs as on one."""
    latents = msgspec.structs.replace(
        FACTS, num_layers=61, num_attention_heads=128, num_kv_heads=1, head_dim=576, kv_vectors=1
    )
    found = [fit(latents, gpus=gpus, engine={"maxModelLen": 32768}).memory for gpus in (1, 8)]
    assert [memory.kv for memory in found if memory] == [round(32768 * 70_272 / GIB, 2)] * 2


def test_the_length_that_the_message_names_fits() -> None:
    assert fit(engine={"maxModelLen": 74752}).refusal is None
    assert fit(engine={"maxModelLen": 76800}).refusal is not None


@pytest.mark.parametrize(
    ("engine", "weights", "kv"),
    [
        ({}, 61.0, 8.0),
        ({"quantization": "fp8"}, 30.5, 8.0),
        ({"args": ["--kv-cache-dtype", "fp8"]}, 61.0, 4.0),
        ({"args": ["--kv-cache-dtype=fp8"]}, 61.0, 4.0),
        ({"args": ["--kv-cache-dtype", "fp8_e5m2"]}, 61.0, 4.0),
        ({"args": ["--kv-cache-dtype", "fp8", "--kv-cache-dtype", "auto"]}, 61.0, 8.0),
        ({"dtype": "float16"}, 61.0, 8.0),
    ],
)
def test_types_decide_over_bytes(engine: Any, weights: float, kv: float) -> None:
    found = fit(engine={"maxModelLen": 65536, **engine})
    assert found.memory is not None
    assert (found.memory.weights, found.memory.kv, found.memory.device) == (weights, kv, 80.0)


def test_float32_doubles_a_checkpoint_of_16_bits() -> None:
    found = fit(facts=FACTS, engine={"maxModelLen": 1024, "dtype": "float32"})
    assert found.memory is not None
    assert (found.memory.weights, found.memory.kv) == (32.0, 0.25)


def test_a_float32_checkpoint_is_halved_by_a_gpu() -> None:
    found = fit(facts=msgspec.structs.replace(FACTS, dtype="float32"), engine={"maxModelLen": 1024})
    assert found.memory is not None
    assert found.memory.weights == 8.0


def test_a_quantized_checkpoint_is_as_it_is() -> None:
    found = fit(facts=msgspec.structs.replace(LARGE, quantization="fp8"), engine={"maxModelLen": 131072})
    assert found.memory is not None
    assert found.memory.weights == 61.0
    assert found.refusal is not None
    assert "quantization" not in found.refusal.message


@pytest.mark.parametrize(("gpus", "weights"), [(1, 17.0), (0, 18.0)])
def test_four_bits_stay_four_on_a_cpu(gpus: int, weights: float) -> None:
    facts = msgspec.structs.replace(FACTS, quantization="mxfp4", weights_bytes=17 * 2**30)
    found = fit(facts=facts, gpus=gpus, engine={"maxModelLen": 1024}, resources={"memory": "80Gi"})
    assert found.memory is not None
    assert found.memory.weights == weights


def test_window_layers_hold_their_window_only() -> None:
    windowed = msgspec.structs.replace(LARGE, num_window_layers=31, window=4096)
    found = fit(facts=windowed, engine={"maxModelLen": 131072})
    assert found.refusal is None
    assert found.memory is not None
    assert found.memory.kv == round((131072 + 31 * 4096) * 2 * 8 * 128 * 2 / GIB, 2)


def test_layers_that_read_what_others_keep_hold_nothing() -> None:
    shared = msgspec.structs.replace(FACTS, num_kv_shared_layers=12, num_window_layers=16, window=512)
    found = fit(facts=shared, engine={"maxModelLen": 65536})
    assert found.memory is not None
    assert found.memory.kv == round((4 * 65536 + 16 * 512) * 2 * 8 * 128 * 2 / GIB, 2)


def test_no_length_is_recommended_that_cannot_be_set() -> None:
    refusal = fit(facts=msgspec.structs.replace(FACTS, weights_bytes=300 * GIB)).refusal
    assert refusal is not None
    assert refusal.path == "spec.resources"
    assert "maxModelLen" not in refusal.message
    assert "quantization" not in refusal.message
    assert "Set resources.gpus: 8, or use" in refusal.message


def test_tensor_ranks_are_recommended_only_where_heads_divide() -> None:
    facts = msgspec.structs.replace(FACTS, weights_bytes=300 * GIB, num_attention_heads=36)
    refusal = fit(facts=facts).refusal
    assert refusal is not None
    assert "Set parallelism.pipeline: 8 and resources.gpus: 8, or use" in refusal.message


def test_each_rank_holds_its_part_of_the_weights_and_heads() -> None:
    one = fit(engine={"maxModelLen": 32768}).memory
    two = fit(engine={"maxModelLen": 32768}, gpus=2).memory
    assert one is not None
    assert two is not None
    assert (two.weights, two.kv, two.device) == (one.weights / 2, one.kv / 2, 80.0)


@pytest.mark.parametrize("gpus", [0, 3])
def test_ranks_among_which_heads_do_not_divide_are_refused_before_a_gpu_is_taken(gpus: int) -> None:
    refusal = fit(facts=FACTS, gpus=gpus, parallelism={"tensor": 3}).refusal
    assert refusal is not None
    assert (refusal.path, refusal.reason) == ("spec.parallelism.tensor", Reason.INVALID_SPEC)
    assert refusal.message == (
        "is 3, and ranks share heads evenly: the model has 32 heads of attention, 8 of keys and values; give one of "
        "1, 2, 4, 8, 16"
    )


def test_what_the_message_recommends_fits() -> None:
    facts = msgspec.structs.replace(FACTS, weights_bytes=300 * GIB)
    assert fit(facts=facts, gpus=8).refusal is None
    refusal = fit(facts=facts, gpus=4).refusal
    assert refusal is not None
    assert refusal.message.startswith("each of 4 GPUs gets weights 75.0 GiB + KV cache")
    assert "70.0 GiB that an engine may use" in refusal.message
    assert "resources.gpus: 8" in refusal.message


@pytest.mark.parametrize(
    ("profiled", "spec", "advised", "written"),
    [
        ({}, {"resources": {"gpus": 4}}, "resources.gpus: 8", {"resources": {"gpus": 8}}),
        ({"gpusPerNode": 4}, {"resources": {"gpus": 4}}, "nodes: 2", {"nodes": 2}),
        (
            {},
            {"resources": {"gpus": 4}, "parallelism": {"pipeline": 2}},
            "resources.gpus: 8",
            {"resources": {"gpus": 8}},
        ),
        ({}, {"parallelism": {"tensor": 4}}, "parallelism.pipeline: 2", {"parallelism": {"tensor": 4, "pipeline": 2}}),
        (
            {"gpusPerNode": 4},
            {"resources": {"gpus": 4}, "parallelism": {"tensor": 4}},
            "parallelism.pipeline: 2",
            {"parallelism": {"tensor": 4, "pipeline": 2}},
        ),
        (
            {"gpusPerNode": 2},
            {"resources": {"gpus": 2}, "nodes": 2, "parallelism": {"tensor": 4}},
            "parallelism.pipeline: 2 and nodes: 4",
            {"nodes": 4, "parallelism": {"tensor": 4, "pipeline": 2}},
        ),
        (
            {"gpusPerNode": 4, "parallelism": {"tensor": 4}},
            {},
            "parallelism.tensor: 4 and parallelism.pipeline: 2",
            {"parallelism": {"tensor": 4, "pipeline": 2}},
        ),
    ],
)
def test_ranks_that_the_message_recommends_fit_whatever_else_is_written(
    profiled: Any, spec: Any, advised: str, written: Any
) -> None:
    facts, one = msgspec.structs.replace(FACTS, weights_bytes=300 * GIB), profile(**profiled)
    given = {**HF, "profileRef": {"name": "h100"}, "resources": {"gpuType": "h100"}, **spec}
    refusal = fit_of(service(**given), one, facts).refusal
    assert refusal is not None
    assert f" {advised}, or use a GPU" in refusal.message
    assert fit_of(service(**{**given, **written}), one, facts).refusal is None


def test_parts_are_not_sent_to_several_nodes() -> None:
    facts, one = msgspec.structs.replace(FACTS, weights_bytes=100 * GIB), profile()
    given = {**HF, "profileRef": {"name": "h100"}, "resources": {"gpus": 1}}
    part = {"parallelism": {"tensor": 1}}
    refusal = fit_of(role_view(service(**given, disaggregation={"prefill": part}), "prefill"), one, facts).refusal
    assert refusal is not None
    assert "Set engine.quantization: fp8, or parallelism.pipeline: 2 and resources.gpus: 2, or use" in refusal.message
    part = {"parallelism": {"tensor": 1, "pipeline": 2}, "resources": {"gpus": 2}}
    advised = role_view(service(**given, disaggregation={"prefill": part}), "prefill")
    assert fit_of(advised, one, facts).refusal is None


def test_ranks_beyond_the_heads_have_copies_of_them() -> None:
    facts = msgspec.structs.replace(FACTS, num_kv_heads=2)
    whole, shared = (fit(facts=facts, engine={"maxModelLen": 65536}, gpus=gpus).memory for gpus in (1, 8))
    assert whole is not None
    assert shared is not None
    assert shared.kv == whole.kv / 2


MIXTURE = msgspec.structs.replace(FACTS, weights_bytes=60 * GIB, num_experts=60, expert_bytes=52 * GIB)


@pytest.mark.parametrize(
    ("facts", "parallelism", "gpus", "weights"),
    [
        (MIXTURE, {"tensor": 8}, 8, 1.0 + 6.5),
        (MIXTURE, {"tensor": 8, "expert": True}, 8, 1.0 + 52 * 8 / 60),
        (MIXTURE, {"tensor": 4, "pipeline": 2, "expert": True}, 8, 1.0 + 6.5),
        (MIXTURE, {"data": 8, "expert": True}, 8, 8.0 + 52 * 8 / 60),
        (MIXTURE, {"data": 4, "expert": True}, 8, 4.0 + 52 * 8 / 60),
        # Copies on one node's CPUs have the experts once.
        (MIXTURE, {"data": 4}, 0, 240.0),
        (MIXTURE, {"data": 4, "expert": True}, 0, 4 * 8.0 + 52.0),
        (MIXTURE, {"tensor": 2, "expert": True}, 0, 60.0),
        (MIXTURE, {"tensor": 2, "data": 4, "expert": True}, 0, 4 * 8.0 + 52.0),
        # Nobody looked: as little as it may be.
        (msgspec.structs.replace(MIXTURE, num_experts=None, expert_bytes=0), {"data": 4, "expert": True}, 0, 60.0),
    ],
)
def test_experts_are_counted_where_they_are(facts: Any, parallelism: Any, gpus: int, weights: float) -> None:
    spec = {"parallelism": parallelism, "engine": {"maxModelLen": 1024}, "resources": {"memory": "1Ti"}}
    found = fit(facts=facts, gpus=gpus, **spec)
    assert found.refusal is None
    assert found.memory is not None
    assert found.memory.weights == round(weights, 2)


@pytest.mark.parametrize("resources", [{"memory": "1Ti"}, {}])
def test_what_a_token_goes_through_of_a_mixture_is_told(resources: dict[str, str]) -> None:
    facts = msgspec.structs.replace(MIXTURE, experts_per_token=6)
    (said, *_) = fit(facts=facts, gpus=0, resources=resources).why
    assert said == "weights: 60.0 GiB in all, 13.2 GiB active for a token, with 6 of 60 experts in a layer"
    assert not [line for line in fit(facts=MIXTURE, gpus=0, resources=resources).why if "active" in line]


def test_a_sequence_is_on_the_nodes_of_its_copy() -> None:
    def kv(nodes: int, **parallelism: Any) -> float:
        spec: dict[str, Any] = {"engine": {"maxModelLen": 4096}, "resources": {"memory": "1Ti"}}
        found = fit(facts=MIXTURE, gpus=0, nodes=nodes, parallelism={**parallelism, "expert": True}, **spec)
        assert found.memory is not None
        return found.memory.kv

    assert kv(2, data=2) == kv(1, data=2), "each copy is whole on its node"
    assert kv(4, data=2) == kv(2, tensor=2, pipeline=1) == kv(1, data=2) / 2, "each is on two"


def test_of_four_bits_only_the_experts_scales_grow_on_a_cpu() -> None:
    facts = msgspec.structs.replace(
        FACTS, quantization="mxfp4", weights_bytes=20 * GIB, num_experts=32, expert_bytes=17 * GIB
    )
    found = fit(facts=facts, gpus=0, engine={"maxModelLen": 1024}, resources={"memory": "80Gi"})
    assert found.memory is not None
    assert found.memory.weights == 3.0 + 18.0


@pytest.mark.parametrize(
    ("changes", "parallelism", "path", "words"),
    [
        (
            {"num_experts": 0},
            {"tensor": 2, "expert": True},
            "expert",
            "is true, and the model has no experts: leave it",
        ),
        (
            {"num_experts": 3},
            {"data": 4, "expert": True},
            "expert",
            "the model has 3 experts in a layer, for 4 ranks: lower parallelism.tensor or parallelism.data, or",
        ),
        (
            {"num_experts": 3},
            {"tensor": 4, "expert": True},
            "expert",
            "the model has 3 experts in a layer, for 4 ranks",
        ),
        ({"num_experts": None}, {"tensor": 2, "expert": True}, "", ""),
        ({"num_experts": 2}, {"tensor": 4}, "", ""),
    ],
)
def test_ranks_that_the_model_has_nothing_for(changes: Any, parallelism: Any, path: str, words: str) -> None:
    facts = msgspec.structs.replace(FACTS, **changes)
    refusal = fit(facts=facts, gpus=0, parallelism=parallelism).refusal
    assert (refusal is None) == (not path)
    if refusal is not None:
        assert (refusal.path, refusal.reason) == (f"spec.parallelism.{path}", Reason.INVALID_SPEC)
        assert words in refusal.message


def test_ranks_on_the_cpu_share_one_memory() -> None:
    spread: dict[str, Any] = {"parallelism": {"tensor": 2}, "engine": {"maxModelLen": 4096}}
    one_head = msgspec.structs.replace(FACTS, num_kv_heads=1)
    whole = fit(facts=one_head, gpus=0, resources={"memory": "64Gi"}, engine={"maxModelLen": 4096}).memory
    found = fit(facts=one_head, gpus=0, resources={"memory": "64Gi"}, **spread).memory
    assert whole is not None
    assert found is not None
    assert (found.weights, found.kv) == (whole.weights, 2 * whole.kv)
    tight = {"memory": "19Gi"}
    assert fit(facts=FACTS, gpus=0, resources=tight, engine={"maxModelLen": 4096}).refusal is None
    assert fit(facts=FACTS, gpus=0, resources=tight, **spread).refusal is not None


def test_unasked_the_length_shrinks_to_what_fits_as_the_engines_does() -> None:
    found = fit()
    assert found.refusal is None
    assert found.max_model_len is not None
    assert 74752 <= found.max_model_len < 76800
    assert any(line.startswith(f"engine.maxModelLen: about {found.max_model_len}") for line in found.why)


def test_unasked_the_models_own_default_is_enough() -> None:
    found = fit(facts=msgspec.structs.replace(LARGE, default_length=32768))
    assert (found.max_model_len, found.why) == (32768, ())


def test_more_than_the_model_was_made_for_is_a_mistake() -> None:
    refusal = fit(engine={"maxModelLen": 200_000}).refusal
    assert refusal is not None
    assert (refusal.path, refusal.reason) == ("spec.engine.maxModelLen", Reason.INVALID_SPEC)
    assert "131072" in refusal.message


@pytest.mark.parametrize(
    ("facts", "memory", "gpus", "words"),
    [
        (None, "80Gi", 1, None),
        (LARGE, None, 1, "its profile has no gpuMemory"),
        (LARGE, "80Gi", 0, "resources.memory is not set"),
    ],
)
def test_what_is_not_known_refuses_nothing(facts: Any, memory: Any, gpus: int, words: str | None) -> None:
    found = fit(facts=facts, memory=memory, gpus=gpus)
    assert found.refusal is None
    assert (found.memory is None) == (facts is None)
    assert any(words in line for line in found.why) if words else found.why == ()


def test_without_gpus_the_memory_of_the_pod_counts() -> None:
    assert fit(facts=FACTS, gpus=0, resources={"memory": "64Gi"}, engine={"maxModelLen": 4096}).refusal is None
    refusal = fit(facts=FACTS, gpus=0, resources={"memory": "16Gi"}, engine={"maxModelLen": 4096}).refusal
    assert refusal is not None
    assert "of 16.0 GiB (resources.memory). Raise resources.memory" in refusal.message
    assert "GPU" not in refusal.message


def test_a_larger_share_is_heeded_and_a_strange_one_left_to_the_engine() -> None:
    args = ["--gpu-memory-utilization", "0.99"]
    assert fit(engine={"maxModelLen": 131072, "args": args}).refusal is None
    strange = fit(engine={"maxModelLen": 131072, "args": ["--gpu-memory-utilization", "much"]})
    assert strange.refusal is not None
    assert "70.2 GiB" in strange.refusal.message


def test_the_default_share_is_the_engines() -> None:
    tree = ast.parse(ENGINE_CONFIG.read_text())
    fields = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and node.value is not None]
    [share] = [node.value for node in fields if ast.unparse(node.target) == "gpu_memory_utilization"]
    assert share is not None
    assert ast.literal_eval(share) == gpu_fit.DEFAULT_SHARE


@given(
    weights=st.integers(0, 200 * GIB),
    layers=st.integers(1, 100),
    windowed=st.integers(0, 100),
    window=st.sampled_from([0, 128, 4096]),
    length=st.integers(1, 1 << 20),
    asked=st.none() | st.integers(1, 1 << 20),
)
def test_what_is_named_as_fitting_fits(
    weights: int, layers: int, windowed: int, window: int, length: int, asked: int | None
) -> None:
    facts = msgspec.structs.replace(
        FACTS,
        weights_bytes=weights,
        num_layers=layers,
        num_window_layers=min(layers, windowed),
        window=window,
        max_position_embeddings=length,
    )
    found = fit(facts=facts, engine={"maxModelLen": asked} if asked else {})
    if found.refusal is None:
        assert found.memory is not None
        assert found.memory.weights + found.memory.kv <= 70.2 + 0.02
        assert found.max_model_len is not None
        assert found.max_model_len <= length
    else:
        assert found.refusal.reason in (Reason.DOES_NOT_FIT, Reason.INVALID_SPEC)
        assert len(found.refusal.message) < 480
