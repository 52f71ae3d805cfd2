"""Every example's YAML is a resource that we take, and its README names files and fields that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_operator.local.manifest import Source, parse_manifest
from pagefleet_operator.local.wanted import check_gpus, ignored_fields, read_wanted
from pagefleet_operator.plan.gpu_fit import check_fit
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.model_facts import ModelFacts
from pagefleet_protocol.resource_documents import parse_inference_profile, parse_inference_service

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = sorted(EXAMPLES.glob("*/*.yaml"))
READMES = sorted(EXAMPLES.glob("*/README.md"))
PATHS = re.compile(r"\bexamples/[\w./-]+")
PIECE = re.compile(r"```yaml\n(.*?)```|\| `((?:cache|model): \{.*?\})`", re.DOTALL)


def document(folder: str, name: str = "inferenceservice.yaml") -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / folder / name).read_text()))


def service(folder: str) -> InferenceService:
    return parse_inference_service(document(folder))


def profile() -> InferenceProfile:
    return parse_inference_profile(document("04-gpu", "profile.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_ours_parse_and_are_in_a_file_of_their_name(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    if path.name in ("inferenceservice.yaml", "external.yaml"):
        assert parse_inference_service(written).name == written["metadata"]["name"]
    elif path.name == "profile.yaml":
        assert parse_inference_profile(written).name == written["metadata"]["name"]
    else:
        assert not written["apiVersion"].startswith("pagefleet.dev/")


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_readmes_name_files_that_exist(path: Path) -> None:
    named = [name.rstrip(".") for name in PATHS.findall(path.read_text())]
    assert [name for name in named if not (EXAMPLES.parent / name).exists()] == []


def test_they_are_numbered_without_a_gap_and_each_has_a_readme() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    assert [int(name[:2]) for name in folders] == list(range(1, len(folders) + 1))
    assert [path.parent.name for path in READMES] == folders


def test_the_gpu_example_names_the_class_that_its_profile_is_for() -> None:
    assert service("04-gpu").spec.resources.gpu_type == profile().spec.gpu_type
    assert profile().spec.resources.gpus == 1
    assert profile().spec.gpu_memory == "80Gi"


def test_the_arithmetic_of_a_model_that_does_not_fit_is_what_the_operator_says() -> None:
    llama_70b = ModelFacts(
        revision="6f6073b423013f6a7d4d9f39144961bfbfbc386b",
        weights_bytes=141_107_412_992,
        num_files=30,
        architecture="llama",
        dtype="bfloat16",
        quantization="",
        num_layers=80,
        num_window_layers=0,
        window=0,
        num_attention_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
    )
    written = document("04-gpu")
    written["spec"]["model"]["uri"] = "hf://meta-llama/Llama-3.3-70B-Instruct"
    service = parse_inference_service(written)
    resolved = resolve(service, {"h100": profile()}, llama_70b)
    assert isinstance(resolved, Resolved)
    shown = " ".join((EXAMPLES / "04-gpu" / "README.md").read_text().split())
    assert str(check_fit(service, resolved).refusal) in shown


def test_several_engines_behind_two_routers() -> None:
    spec = service("05-replicas").spec
    assert (spec.replicas, spec.router.replicas) == (3, 2)
    target = document("05-replicas", "autoscaler.yaml")["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == ("pagefleet.dev/v1alpha1", "InferenceService")
    assert target["name"] == service("05-replicas").name
    assert spec.resources.cpu is not None, "an autoscaler by CPU needs a request"


def test_the_gated_model_comes_with_its_secret_and_a_claim() -> None:
    spec = service("06-pvc-cache").spec
    readme = (EXAMPLES / "06-pvc-cache" / "README.md").read_text()
    assert spec.model.secret_ref is not None
    assert f"create secret generic {spec.model.secret_ref.name} --from-literal=HF_TOKEN=" in readme
    assert (spec.cache.type, spec.cache.size) == ("pvc", "40Gi")


def test_the_gateway_example_makes_the_secret_that_its_routers_read() -> None:
    spec = service("07-gateway").spec
    readme = (EXAMPLES / "07-gateway" / "README.md").read_text()
    assert spec.router.auth is not None
    secret = spec.router.auth.secret_ref
    assert f"create secret generic {secret.name} --from-literal={secret.key}=" in readme
    assert spec.expose.type == "Gateway"
    assert f"https://{spec.expose.host}/v1/chat/completions" in readme


@pytest.mark.parametrize(
    "path", [path for path in READMES if PIECE.search(path.read_text())], ids=lambda p: p.parent.name
)
def test_pieces_of_yaml_in_readmes_are_fields_of_the_spec(path: Path) -> None:
    """Blocks, and what tables say to write."""
    for block, cell in PIECE.findall(path.read_text()):
        written = document(path.parent.name)
        spec = {"model": written["spec"]["model"], **yaml.safe_load(block or cell)}
        assert parse_inference_service({**written, "spec": spec}).name == written["metadata"]["name"]


def test_the_example_of_scaling_to_zero_is_for_any_machine() -> None:
    path = EXAMPLES / "09-scale-to-zero" / "inferenceservice.yaml"
    (wanted,) = read_wanted(parse_manifest((Source(path, path.read_bytes()),)), {})
    assert ignored_fields(wanted) == ()
    assert check_gpus((wanted,), 0) == []
    spec = wanted.service.spec
    assert spec.autoscaling is not None
    assert spec.autoscaling.scale_to_zero is not None
    shown = (path.parent / "README.md").read_text()
    assert f"from 3 to 0: nobody asked for {spec.autoscaling.scale_to_zero.after} s" in shown
    assert f"`router.queue.coldStartTimeout` ({spec.router.queue.cold_start_timeout} s) bounds it" in shown


def test_the_example_of_nodes_is_for_any_machine() -> None:
    path = EXAMPLES / "15-several-nodes" / "inferenceservice.yaml"
    (wanted,) = read_wanted(parse_manifest((Source(path, path.read_bytes()),)), {})
    assert check_gpus((wanted,), 0) == []
    assert (wanted.resolved.nodes, wanted.resolved.ranks.per_node) == (2, 1)


def test_the_example_of_ranks_is_for_any_machine() -> None:
    path = EXAMPLES / "14-tensor-parallel" / "inferenceservice.yaml"
    (wanted,) = read_wanted(parse_manifest((Source(path, path.read_bytes()),)), {})
    assert check_gpus((wanted,), 0) == []
    assert wanted.resolved.ranks.tensor == 2
