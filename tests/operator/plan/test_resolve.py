"""Which value a setting gets, and what is said about where it comes from."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_operator.plan.ranks import Ranks
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_operator.plan.roles import PAIR_ROLES, role_view
from pagefleet_operator.plan.verdict import Refusal

from tests.operator.plan.kube_world import COMMIT, FACTS, HF, SETTINGS, profile, service


def resolved(profiles: Any = (), facts: Any = None, **spec: Any) -> Resolved:
    found = resolve(service(**spec), {one.name: one for one in profiles}, facts, SETTINGS.engine_image)
    assert isinstance(found, Resolved), found
    return found


def refusal(profiles: Any = (), **spec: Any) -> Refusal:
    found = resolve(service(**spec), {one.name: one for one in profiles}, None, SETTINGS.engine_image)
    assert isinstance(found, Refusal)
    return found


def test_five_lines_get_defaults_and_reasons_for_them() -> None:
    found = resolved(**HF)
    assert (found.cache, found.revision, found.image) == ("none", "main", "pagefleet-engine:1")
    assert (found.gpus, found.dtype, found.shm, found.max_model_len) == (0, "auto", "1Gi", None)
    assert (found.max_surge, found.max_unavailable) == (1, 0)
    assert found.why == (
        "cache.type: none, the default: each engine downloads the model when it starts",
        "resources.gpus: 0, the default",
        "rollout.maxSurge: 1, the default",
        "rollout.maxUnavailable: 0, as maxSurge is 1",
        "engine.image: pagefleet-engine:1, the default",
        "engine.dtype: auto, the default",
        "resources.shm: 1Gi, the default",
    )


def test_spec_wins_over_profile_and_profile_over_defaults() -> None:
    h100 = profile(
        engine={"dtype": "float16", "maxModelLen": 4096, "args": ["--max-num-seqs", "64"]},
        resources={"cpu": "8", "memory": "64Gi", "gpus": 1},
        nodeSelector={"gpu": "h100"},
        runtimeClassName="nvidia",
        gpuResource="example.com/gpu",
    )
    found = resolved(
        [h100],
        **HF,
        profileRef={"name": "h100"},
        engine={"maxModelLen": 8192, "args": ["--seed", "1"]},
        resources={"cpu": "16"},
    )
    assert (found.dtype, found.max_model_len, found.cpu, found.memory) == ("float16", 8192, "16", "64Gi")
    assert found.args == ("--max-num-seqs", "64", "--seed", "1")
    assert (found.node_selector, found.runtime_class) == ({"gpu": "h100"}, "nvidia")
    assert found.gpu_resource == "example.com/gpu"
    assert "engine.dtype: float16, from profile h100" in found.why
    assert "resources.gpus: 1, from profile h100" in found.why
    assert not any(line.startswith(("engine.maxModelLen", "resources.cpu")) for line in found.why)


def test_of_two_variables_with_one_name_the_services_counts() -> None:
    h100 = profile(engine={"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]})
    found = resolved([h100], profileRef={"name": "h100"}, engine={"env": [{"name": "A", "value": "2"}]})
    assert [(one.name, one.value) for one in found.env] == [("B", "1"), ("A", "2")]


def test_gpu_type_finds_its_profile_and_asks_for_a_gpu() -> None:
    found = resolved([profile(), profile("l4", gpuType="l4")], resources={"gpuType": "h100"})
    assert found.profile is not None
    assert (found.profile.name, found.gpus) == ("h100", 1)
    assert "resources.gpus: 1, as gpuType is h100" in found.why


def test_gpus_are_ranks_and_bring_their_part_of_the_host() -> None:
    h100 = profile(resources={"gpus": 1, "cpu": "7500m", "memory": "64Gi", "shm": "4Gi"})
    found = resolved([h100], resources={"gpuType": "h100", "gpus": 4})
    assert (found.gpus, found.ranks.tensor) == (4, 4)
    assert (found.cpu, found.memory, found.shm) == ("30000m", "256Gi", "16Gi")
    assert "parallelism.tensor: 4, as there are 4 GPUs" in found.why
    assert "resources.memory: 256Gi, from profile h100" in found.why
    written = resolved([h100], resources={"gpuType": "h100", "gpus": 4, "cpu": "8", "memory": "100Gi"})
    assert (written.cpu, written.memory, written.shm) == ("8", "100Gi", "16Gi")


def test_a_profile_for_a_whole_node_lends_a_part_of_it() -> None:
    node = profile(resources={"gpus": 8, "cpu": "100", "memory": "1Ti", "shm": "8Gi"})
    assert resolved([node], profileRef={"name": "h100"}).ranks.tensor == 8
    found = resolved([node], profileRef={"name": "h100"}, resources={"gpus": 3})
    assert (found.cpu, found.memory, found.shm) == ("37.5", "0.375Ti", "3Gi")


@pytest.mark.parametrize("resources", [{"gpuType": "h100"}, {"gpuType": "a100"}])
def test_ranks_ask_for_a_gpu_each_where_there_are_gpus(resources: Any) -> None:
    found = resolved([profile(resources={"gpus": 1})], resources=resources, parallelism={"tensor": 2})
    assert (found.gpus, found.ranks.tensor, found.shm) == (2, 2, "2Gi")
    assert "resources.gpus: 2, as there are 2 ranks" in found.why


@pytest.mark.parametrize(
    ("profiled", "spec", "words"),
    [
        (
            {"resources": {"gpus": 8}},
            {"disaggregation": {"dataPlane": "cuda_ipc"}},
            "with 8 ranks K/V of several ranks",
        ),
    ],
)
def test_ranks_from_a_profile_may_not_go_with_kv_that_leaves_the_engine(profiled: Any, spec: Any, words: str) -> None:
    found = refusal([profile(**profiled)], profileRef={"name": "h100"}, **spec)
    assert (found.path, found.reason) == ("spec.parallelism", Reason.INVALID_SPEC)
    assert words in found.message


def test_each_part_has_ranks_of_its_own() -> None:
    parts = {"prefill": {"parallelism": {"tensor": 4}}, "decode": {"resources": {"gpus": 1}}}
    whole = service(resources={"gpus": 2}, parallelism={"tensor": 2}, disaggregation=parts)
    found = [resolve(role_view(whole, role), {}, None) for role in PAIR_ROLES]
    assert [one.ranks for one in found if isinstance(one, Resolved)] == [Ranks(4, gpus=4), Ranks(1, gpus=1)]
    stages = {"prefill": {"parallelism": {"pipeline": 2}}}
    view = role_view(service(resources={"gpus": 4}, disaggregation=stages), "prefill")
    assert isinstance(follows := resolve(view, {}, None), Resolved)
    assert follows.ranks == Ranks(2, 2, gpus=4)
    copies = {"prefill": {"parallelism": {"tensor": 2, "data": 2}}}
    assert isinstance(
        copied := resolve(role_view(service(resources={"gpus": 8}, disaggregation=copies), "prefill"), {}, None),
        Resolved,
    )
    assert copied.ranks == Ranks(2, data=2, gpus=4), "a GPU for each rank of each copy"
    both = service(parallelism={"tensor": 2}, disaggregation={})
    assert role_view(both, "decode").spec.parallelism.tensor == 2


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        ({}, Ranks(2, expert=True)),
        ({"parallelism": {"tensor": 4}}, Ranks(4, expert=True)),
        ({"parallelism": {"expert": False}}, Ranks(2)),
        ({"resources": {"gpus": 4}}, Ranks(4, gpus=4, expert=True)),
    ],
)
def test_parts_have_whole_experts_unless_they_say_otherwise(decode: Any, expected: Ranks) -> None:
    whole = service(parallelism={"tensor": 2, "expert": True}, disaggregation={"decode": decode})
    found = resolve(role_view(whole, "decode"), {}, None)
    assert isinstance(found, Resolved)
    assert found.ranks == expected


def test_gpu_type_without_a_profile_is_told_and_gives_no_defaults() -> None:
    found = resolved([profile()], resources={"gpuType": "b200", "gpus": 1})
    assert found.profile is None
    assert any("b200, for which there is no InferenceProfile" in line for line in found.why)


def test_who_says_none_gets_no_gpu() -> None:
    assert resolved([profile()], resources={"gpuType": "h100", "gpus": 0}).gpus == 0


@pytest.mark.parametrize(
    ("profiles", "spec", "path", "reason", "words"),
    [
        ([profile("a"), profile("l4")], {"profileRef": {"name": "b"}}, "spec.profileRef.name",
         Reason.PROFILE_NOT_FOUND, "no InferenceProfile b; name one of a, l4"),
        ([], {"profileRef": {"name": "b"}}, "spec.profileRef.name", Reason.PROFILE_NOT_FOUND, "there are none"),
        ([profile("b"), profile("a")], {"resources": {"gpuType": "h100"}}, "spec.resources.gpuType",
         Reason.PROFILE_INVALID, "a and b are all for gpuType h100: name one in spec.profileRef"),
    ],
)  # fmt: skip
def test_profiles_that_cannot_be_found(profiles: Any, spec: Any, path: str, reason: Reason, words: str) -> None:
    found = refusal(profiles, **spec)
    assert (found.path, found.reason) == (path, reason)
    assert words in found.message


def test_a_named_profile_settles_between_two_of_one_gpu_type() -> None:
    found = resolved([profile("a"), profile("b")], resources={"gpuType": "h100"}, profileRef={"name": "b"})
    assert found.profile is not None
    assert found.profile.name == "b"


@pytest.mark.parametrize(
    ("model", "cache", "expected"),
    [
        ("builtin://tiny", {}, ("builtin", "", False)),
        ("file:///models/x", {}, ("file", "", False)),
        ("oci://reg.example/m:1", {}, ("image", "", False)),
        ("pvc://claim/a/b", {}, ("pvc", "claim", False)),
        ("hf://o/m", {"type": "pvc"}, ("pvc", "qwen-model", True)),
        ("s3://bucket/m", {"type": "pvc", "claim": "theirs"}, ("pvc", "theirs", False)),
        ("gs://bucket/m", {"type": "hostPath", "path": "/var/models"}, ("hostPath", "", False)),
        ("s3://bucket/m", {"type": "none"}, ("none", "", False)),
    ],
)
def test_cache_follows_from_the_uri_and_the_wish(model: str, cache: Any, expected: Any) -> None:
    found = resolved(model={"uri": model}, cache=cache)
    assert (found.cache, found.claim, found.makes_claim) == expected


@pytest.mark.parametrize(
    ("model", "facts", "expected"),
    [
        ({"uri": "hf://o/m"}, None, "main"),
        ({"uri": "hf://o/m"}, FACTS, COMMIT),
        ({"uri": "hf://o/m", "revision": "v2"}, None, "v2"),
        ({"uri": "hf://o/m", "revision": "v2"}, FACTS, COMMIT),
        ({"uri": "s3://bucket/m"}, FACTS, ""),
        ({"uri": "builtin://tiny"}, None, ""),
    ],
)
def test_a_branch_becomes_the_commit_that_it_meant(model: Any, facts: Any, expected: str) -> None:
    found = resolved(facts=facts, model=model)
    assert found.revision == expected
    assert any(line.startswith("model.revision") for line in found.why) == (expected == COMMIT)


@pytest.mark.parametrize(
    ("rollout", "gpus", "spare", "expected"),
    [
        ({}, 0, False, (1, 0)),
        ({}, 1, False, (0, 1)),
        ({}, 1, True, (1, 0)),
        ({"maxSurge": 2}, 1, False, (2, 0)),
        ({"maxSurge": 0}, 0, False, (0, 1)),
        ({"maxUnavailable": 2}, 1, False, (0, 2)),
        ({"maxUnavailable": 0}, 1, False, (1, 0)),
        ({"maxSurge": 0, "maxUnavailable": 3}, 0, True, (0, 3)),
    ],
)
def test_a_rollout_takes_no_gpu_that_may_not_be_there(rollout: Any, gpus: int, spare: bool, expected: Any) -> None:
    found = resolved([profile(spareGpus=spare)], profileRef={"name": "h100"}, resources={"gpus": gpus}, rollout=rollout)
    assert (found.max_surge, found.max_unavailable) == expected
    assert found.max_surge + found.max_unavailable > 0


def test_outside_a_cluster_there_are_no_images() -> None:
    found = resolve(service(), {}, None)
    assert isinstance(found, Resolved)
    assert found.image == ""
    assert not any("image" in line for line in found.why)
