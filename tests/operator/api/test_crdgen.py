"""The generated CustomResourceDefinition: as committed, structural, and in agreement with the types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_operator.api import crdgen
from pagefleet_protocol.resource_rules import PROFILE_RULES, SERVICE_RULES

CRDS = Path(__file__).parents[3] / "crds"
FILE = "inferenceservices.pagefleet.dev.yaml"
PROFILE_FILE = "inferenceprofiles.pagefleet.dev.yaml"
DEFINITIONS = crdgen.definitions()
REFUSED = {"$ref", "$defs", "definitions", "const", "title", "allOf"}


def the_version(file: str) -> dict[str, Any]:
    (only,) = DEFINITIONS[file]["spec"]["versions"]
    assert isinstance(only, dict)
    return only


@pytest.fixture
def version() -> dict[str, Any]:
    return the_version(FILE)


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    below = [schema[name] for name in ("items", "additionalProperties") if name in schema]
    for child in [*schema.get("properties", {}).values(), *below]:
        yield from nodes(child)


@pytest.mark.parametrize("file", DEFINITIONS)
def test_the_committed_file_is_the_generated_one(file: str) -> None:
    committed = (CRDS / file).read_text(encoding="utf-8")
    assert committed == crdgen.render(DEFINITIONS[file]), "run `make crds`"


def test_no_other_file_is_committed() -> None:
    assert {path.name for path in CRDS.iterdir()} == set(DEFINITIONS) == {FILE, PROFILE_FILE}


def test_names_are_those_of_the_map() -> None:
    service, profile = (DEFINITIONS[file]["spec"] for file in (FILE, PROFILE_FILE))
    assert service["names"]["kind"] == "InferenceService"
    assert service["names"]["shortNames"] == ["pfis"]
    assert service["names"]["categories"] == profile["names"]["categories"] == ["pagefleet"]
    assert (service["scope"], profile["scope"]) == ("Namespaced", "Cluster")
    assert profile["names"]["kind"] == "InferenceProfile"


@pytest.mark.parametrize("file", DEFINITIONS)
def test_every_node_is_structural(file: str) -> None:
    """Each has a type (or is int-or-string), and none of the keywords that the API server refuses."""
    for node in nodes(the_version(file)["schema"]["openAPIV3Schema"]):
        assert ("type" in node) != bool(node.get("x-kubernetes-int-or-string"))
        assert not set(node) & REFUSED
        assert "anyOf" not in node or node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        if node.get("type") == "array":
            assert "items" in node
            assert node["x-kubernetes-list-type"] in ("atomic", "map", "set")


@pytest.mark.parametrize("file", DEFINITIONS)
def test_what_people_write_is_bounded(file: str) -> None:
    """The cost of rules, and the size of a resource, follow from the limits of its fields."""
    spec = the_version(file)["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for node in nodes(spec):
        if node.get("type") == "array":
            assert "maxItems" in node
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node
        if "additionalProperties" in node:
            assert node["maxProperties"] == 16


@pytest.mark.parametrize("file", DEFINITIONS)
def test_the_names_limit_counts_for_the_cost_of_rules(file: str) -> None:
    """Where metadata lacks one of the two, the API server assumes metadata whose name has no limit."""
    metadata = the_version(file)["schema"]["openAPIV3Schema"]["properties"]["metadata"]
    assert metadata["properties"] == {"name": {"type": "string", "maxLength": 253}, "generateName": {"type": "string"}}


@pytest.mark.parametrize(("file", "rules"), [(FILE, SERVICE_RULES), (PROFILE_FILE, PROFILE_RULES)])
def test_every_rule_is_at_its_place_once(file: str, rules: Any) -> None:
    found = [
        validation["message"]
        for node in nodes(the_version(file)["schema"]["openAPIV3Schema"])
        for validation in node.get("x-kubernetes-validations", [])
    ]
    assert sorted(found) == sorted(rule.message for rule in rules)


def test_only_the_model_is_required(version: dict[str, Any]) -> None:
    root = version["schema"]["openAPIV3Schema"]
    assert root["required"] == ["spec"]
    assert root["properties"]["spec"]["required"] == ["model"]
    assert root["properties"]["spec"]["properties"]["model"]["required"] == ["uri"]


def test_defaults_reach_the_fields_of_objects_that_are_left_out(version: dict[str, Any]) -> None:
    """The API server applies a field's default only inside an object that exists, so objects default to {}."""
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert spec["router"]["default"] == {}
    assert spec["router"]["properties"]["policy"]["default"] == "auto"
    assert spec["replicas"]["default"] == 1
    assert "default" not in spec["engine"]["properties"]["maxModelLen"]


def test_profiles_need_nothing_but_a_name() -> None:
    assert "required" not in the_version(PROFILE_FILE)["schema"]["openAPIV3Schema"]


def test_pod_templates_are_taken_as_they_are(version: dict[str, Any]) -> None:
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    template = {key: value for key, value in spec["podTemplate"].items() if key != "description"}
    assert template == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def test_status_and_scale_are_subresources(version: dict[str, Any]) -> None:
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    assert version["subresources"]["status"] == {}
    for path in version["subresources"]["scale"].values():
        first, second = path.removeprefix(".").split(".")
        assert second in properties[first]["properties"]


@pytest.mark.parametrize("file", DEFINITIONS)
def test_columns_point_into_the_schema(file: str) -> None:
    version = the_version(file)
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    for column in version["additionalPrinterColumns"]:
        first, second, *_ = column["jsonPath"].removeprefix(".").replace("[", ".").split(".")
        if first != "metadata":
            assert second in properties[first]["properties"]


def test_writes_into_a_folder(tmp_path: Path) -> None:
    assert crdgen.main([str(tmp_path)]) == 0
    written = {path.name: yaml.safe_load(path.read_text()) for path in tmp_path.iterdir()}
    assert written == DEFINITIONS


def test_without_a_folder_tells_the_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crdgen.main([]) == crdgen.main([str(tmp_path / "missing")]) == 2
    assert "usage: python -m pagefleet_operator.api.crdgen FOLDER" in capsys.readouterr().err
